"""Runs of several processes: the same config gives the same drafter, whoever computes what."""

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

pytestmark = pytest.mark.slow

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


@pytest.fixture(scope="module")
def mill(tiny_target: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mill]:
    before = set(SHARED.iterdir())
    with Mill.opened(tmp_path_factory.mktemp("mill"), tiny_target, prepared) as mill:
        yield mill
    wait_for(lambda: set(SHARED.iterdir()) <= before, 30)  # other tests' files may come and go


@pytest.fixture(scope="module")
def alone(mill: Mill) -> Run:
    """One process that does it all."""
    run = mill.train("alone")
    assert_each_batch_once(run)
    return run


@pytest.mark.parametrize(
    ("targets", "arguments"), [(1, ("handoff.slots=16",)), (2, ("handoff.slots=1",)), (3, ("handoff.queue=host",))]
)
def test_any_number_of_targets_and_slots_gives_the_same_drafter(
    mill: Mill, alone: Run, targets: int, arguments: tuple[str, ...]
) -> None:
    run = mill.train(f"targets-{targets}", *split(targets, 1), *arguments)
    assert_same(run, alone)
    slots = {1: 16, 2: 1, 3: 7}[targets]
    assert f"hidden states: {slots} slot" in run.said
    assert all(row["waits"]["slots_in_use"] <= slots for row in metrics(run.folder))


def test_hidden_states_lie_in_memory_without_a_name(mill: Mill, alone: Run) -> None:
    """So neither the size of /dev/shm nor what is in it matters, and nothing can be left there."""
    run = mill.start("nameless", *split(2, 2))
    run.await_rows(1)
    for worker in run.status()["workers"]:
        files = {file.path for file in run.worker(worker).memory_maps()}
        assert any("memfd:draftmill-hidden-states" in file for file in files), worker
        assert not any(file.startswith(str(SHARED)) for file in files), worker
    assert run.end() == 0
    assert_same(run, alone)  # two ranks, two batches a step: one addition, which has no order


def test_ranks_that_run_the_target_themselves_equal_ranks_that_are_supplied(mill: Mill) -> None:
    options = ("train.accumulation=4", "decode_check_prompts=2")
    inline = mill.train("inline", "devices.inline=cpu*2", *options)
    supplied = mill.train("supplied", *split(2, 2), *options)
    assert_same(supplied, inline, batches=4 * STEPS)
    assert_each_batch_once(inline, 4 * STEPS)
    one_rank = mill.train("one-rank", options[0])
    assert_close(inline, one_rank)
    for run in (inline, supplied):
        assert "100% of blocks agree" in run.said
        assert run.status()["decode_check"]["flagged"] is False


def test_interrupted_and_resumed_with_other_targets_is_the_same_run(mill: Mill, alone: Run) -> None:
    run = mill.start("resumed", *split(1, 1))
    run.await_rows(6)
    run.interrupt()
    assert run.end(30) == 130, run.said
    assert 6 <= run.status()["step"] < STEPS
    resumed = mill.train("resumed", *split(3, 2), "--resume")
    assert "resuming from" in resumed.said
    assert_same(resumed, alone)


def test_a_drafter_in_parts_is_the_same_drafter_and_resumes_as_a_whole(mill: Mill) -> None:
    whole = mill.train("whole", "train.accumulation=4")
    run = mill.start("parts", *split(1, 2), "parallel=fsdp", "train.accumulation=4")
    run.await_rows(6)
    run.interrupt()
    assert run.end(30) == 130, run.said
    resumed = mill.train("parts", "train.accumulation=4", "--resume")
    assert_close(resumed, whole)
    assert_each_batch_once(resumed, 4 * STEPS)


WRONG = [
    (("devices.inline=cpu*3",), r"train\.accumulation: 2 .* set train\.accumulation=3"),
    (("devices.targets=cpu",), r"devices\.drafters is missing"),
    (("devices.targets=cpu", "devices.drafters=cpu", "devices.inline=cpu"), r"devices\.inline means"),
    (("devices.inline=tpu",), r"'tpu' is not a device"),
    (("devices.inline=cuda:99",), r"devices: cuda:99, but torch sees \d+ CUDA device"),
    (("parallel=fsdp",), r"parallel: fsdp spreads the drafter over several ranks"),
    ((*split(1, 1), "handoff.slots=100000000"), r"handoff\.slots: 100000000 slots .* set handoff\.slots=\d+"),
]


def test_wrong_devices_are_one_line_before_anything_starts(mill: Mill) -> None:
    runs = [mill.start(f"wrong-{number}", *arguments) for number, (arguments, _) in enumerate(WRONG)]
    for run, (arguments, pattern) in zip(runs, WRONG, strict=True):
        assert run.end() == 2, (arguments, run.said)
        assert len(run.error_lines) == 1, run.said
        assert re.search(pattern, run.error_lines[0]), run.said
        assert "Traceback" not in run.said
        assert "workers" not in run.status()
