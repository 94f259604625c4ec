"""Real runs of several processes: started, watched, compared, and ended whatever happens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from run_helpers import metrics, wait_for
from safetensors.torch import load_file

from draftmill.run.ledger import read_ledger

STEPS, BATCHES_PER_STEP = 24, 2
SHARED = Path("/dev/shm")


@dataclass
class Run:
    """A `draftmill train` in a session of its own, so that all its processes can be found: they share its id."""

    folder: Path
    process: subprocess.Popen[str]
    errors: Path  # what it says

    @property
    def said(self) -> str:
        return self.errors.read_text()

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.said.splitlines() if line.startswith("error: ")]

    def status(self) -> dict[str, Any]:
        path = self.folder / "status.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def worker(self, name: str) -> psutil.Process:
        return psutil.Process(self.status()["workers"][name]["pid"])

    def phase(self, worker: str) -> str | None:
        found = self.status().get("workers", {}).get(worker)
        return None if found is None else str(found["phase"])

    def await_that(self, condition: Callable[[], bool]) -> None:
        """Waits as long as the run goes on."""
        wait_for(lambda: condition() or self.process.poll() is not None)
        assert self.process.poll() is None, f"the run ended before: {self.said}"

    def await_rows(self, count: int) -> None:
        self.await_that(lambda: len(metrics(self.folder)) >= count)

    def await_said(self, pattern: str) -> None:
        self.await_that(lambda: re.search(pattern, self.said) is not None)

    def end(self, seconds: float = 180) -> int:
        """The exit code. Nothing may be left of the run by then."""
        code = self.process.wait(timeout=seconds)
        wait_for(lambda: not self.processes(), 10)
        assert not list(self.folder.glob("rendezvous*"))
        return code

    def processes(self) -> list[psutil.Process]:
        """All that are alive, whoever is their parent by now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends it to all processes."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill_all(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


@dataclass
class Mill:
    """Starts runs of one config and ends what is left of them."""

    folder: Path
    config: Path
    runs: list[Run] = field(default_factory=list)

    def start(self, name: str, *arguments: str) -> Run:
        errors = self.folder / f"{name}-{len(self.runs)}.err"
        command = ("train", str(self.config), f"run_dir={self.folder / name}", *arguments)
        with errors.open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "draftmill", *command],
                stdout=subprocess.DEVNULL, stderr=err, text=True, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.runs.append(Run(self.folder / name, process, errors))
        return self.runs[-1]

    def train(self, name: str, *arguments: str) -> Run:
        """A run that must come to its end."""
        run = self.start(name, *arguments)
        assert run.end() == 0, run.said
        return run

    @classmethod
    @contextlib.contextmanager
    def opened(cls, folder: Path, target: Path, prepared: Path) -> Iterator[Mill]:
        config = {
            "run_dir": str(folder / "run"),
            "threads": 1,
            "decode_check_prompts": 0,
            "data": {"prepared": str(prepared), "token_budget": 192},
            "target": {"model": str(target)},
            "drafter": {"layers": 1, "block_size": 4},
            "train": {
                "epochs": 100, "max_steps": STEPS, "accumulation": BATCHES_PER_STEP, "anchors": 24, "log_every": 1,
                "save_every": 5, "lr": 0.003,
            },
        }  # fmt: skip
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        mill = cls(folder, path)
        try:
            yield mill
        finally:
            for run in mill.runs:
                run.kill_all()


def split(targets: int, drafters: int) -> tuple[str, str]:
    return f"devices.targets=cpu*{targets}", f"devices.drafters=cpu*{drafters}"


def weights(run: Run, step: int = STEPS) -> Path:
    return run.folder / "checkpoints" / f"step-{step:08d}" / "drafter.safetensors"


def rows(run: Run) -> list[dict[str, Any]]:
    """Metrics without what time and the number of processes decide."""
    return [{key: value for key, value in row.items() if key != "waits"} for row in metrics(run.folder)]


def assert_each_batch_once(run: Run, batches: int = STEPS * BATCHES_PER_STEP) -> None:
    assert read_ledger(run.folder / "ledger.jsonl") == Counter(range(batches))


def assert_same(run: Run, other: Run, step: int = STEPS, batches: int = STEPS * BATCHES_PER_STEP) -> None:
    """Bit for bit, and every batch was trained once."""
    assert rows(run) == rows(other)
    digests = [hashlib.sha256(weights(one, step).read_bytes()).hexdigest() for one in (run, other)]
    assert digests[0] == digests[1]
    assert_each_batch_once(run, batches)


def assert_close(run: Run, other: Run) -> None:
    """Equal but for the order of additions."""
    for one, two in zip(rows(run), rows(other), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-3)
        assert (one["blocks"], one["context_tokens"]) == (two["blocks"], two["context_tokens"])
    first, second = load_file(weights(run)), load_file(weights(other))
    for name in first:
        difference = (first[name].float() - second[name].float()).norm()
        assert difference <= 0.02 * second[name].float().norm(), name
