"""`draftmill train --dry-run`: the whole way of a run, with two optimizer steps.

It calls what the real commands call: `train` with the same devices, processes, shapes and data, then the export and its
check. All of it happens in RUN/dry-run, which goes when all went well; the run itself is not touched.
"""

from __future__ import annotations

import errno
import importlib
import json
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftmill.config import RunConfig, TrackingConfig
from draftmill.errors import UserError
from draftmill.run.events import tail
from draftmill.run.files import RunFolder
from draftmill.run.peaks import Peaks, peaks_of
from draftmill.run.train import train

STEPS = 2
FOLDER = "dry-run"
STAGES = {  # phase of a run → what the table calls it
    "loading": "load the target",
    "compiling": "build the drafter, compile",
    "training": "train",
    "checking": "decode a prompt",
}
ENDS = ("finished", "stopped", "failed")
NO_SPEED = (
    "no tokens/s, no time left: two steps are compiling, warming up and first allocations. `draftmill plan` estimates "
    "them, `draftmill status` measures them once a run is under way"
)


@dataclass(slots=True)
class Stage:
    """failed: what went wrong, None where nothing did. found: worth a line."""

    name: str
    seconds: float
    found: str = ""
    failed: str | None = None
    remedy: str = ""


@dataclass(slots=True)
class DryRun:
    """What has been done so far."""

    folder: RunFolder
    stages: list[Stage] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(stage.failed is not None for stage in self.stages)

    def stage(self, name: str, work: Callable[[], str]) -> None:
        """Unless one before it failed."""
        if self.failed:
            return
        started = time.perf_counter()
        try:
            found = work()
        except Exception as error:
            self.stages.append(Stage(name, time.perf_counter() - started, "", *in_words(error)))
        else:
            self.stages.append(Stage(name, time.perf_counter() - started, found))


def dry_run(config: RunConfig, console: Console) -> int:
    """Print what each stage took and whether it went well. Returns the exit code: 0, 1 where a stage failed, or that of
    a run that was interrupted. UserError for what `train` refuses before it loads anything."""
    done = DryRun(RunFolder(config.run_dir / FOLDER))
    with _cleared(config.run_dir, done), peaks_of(done.folder.status) as peaks:
        code = _train(shortened(config), done)
        if code:
            return code
        done.stage("export", lambda: _export(done.folder.root))
        done.stage("check the export", lambda: _check(done.folder.root))
    _print(done, peaks, console)
    return 1 if done.failed else 0


def shortened(config: RunConfig) -> RunConfig:
    """The same run, but of two steps, in a folder of its own, and nobody else is told of it."""
    steps = min(STEPS, config.train.max_steps or STEPS)
    # a log line only at the end: a speed between two first steps would mislead
    train = config.train.model_copy(update={"max_steps": steps, "max_minutes": None, "log_every": STEPS})
    nobody = TrackingConfig.model_validate({})
    folder = config.run_dir / FOLDER
    own = {"run_dir": folder, "train": train, "decode_check_prompts": 1, "tracking": nobody}
    return config.model_copy(update=own)


@contextmanager
def _cleared(run: Path, done: DryRun) -> Iterator[None]:
    """The folder is new, and stays only where a stage failed."""
    there, root = run.exists(), done.folder.root
    if done.folder.is_locked():
        raise UserError(f"{root} is in use by a dry run that is still going; wait for it, or stop it")
    _remove(root)
    try:
        yield
    finally:
        if not done.failed:
            _remove(root)
            if not there and run.is_dir() and not any(run.iterdir()):
                run.rmdir()


def _remove(root: Path) -> None:
    try:
        if root.exists():
            shutil.rmtree(root)
    except OSError as error:
        raise UserError(f"{root} cannot be removed ({error.strerror}); remove it yourself") from error


def _train(config: RunConfig, done: DryRun) -> int:
    """`train` as it is. What its stages took is read from the record it writes. Returns an exit code other than 0 only
    if it was interrupted."""
    started, failure = time.time(), None
    try:
        code = train(config, resume=False, trial=True)
    except Exception as error:
        if not _begun(done.folder):
            raise  # refused, before anything was loaded
        failure, code = error, 0
    done.stages += read_stages(done.folder, started, time.time())
    last = done.stages[-1]
    if failure is not None:
        last.failed, last.remedy = in_words(failure)
    elif (check := _status(done.folder).get("decode_check")) is not None:
        _judge(last, check)
    return code


def _begun(folder: RunFolder) -> bool:
    return any(event.get("text") == "loading" for event in _phases(folder))


def _phases(folder: RunFolder) -> list[dict[str, Any]]:
    """Of the run as a whole, in order."""
    return [event for event in tail(folder.events) if event.get("kind") == "phase" and "worker" not in event]


def read_stages(folder: RunFolder, started: float, ended: float) -> list[Stage]:
    """From the phases in events.jsonl, the last one to `ended`; times since 1970. Saving is taken out of training."""
    begun = [(event["text"].partition(":")[0], event["time"]) for event in _phases(folder)]
    begun = [("settle what the run is", started), *begun]
    ends = [*(at for _, at in begun[1:]), ended]
    stages = [
        Stage(STAGES.get(name, name), max(0.0, end - at))
        for (name, at), end in zip(begun, ends, strict=True)
        if name not in ENDS
    ]
    saves = [event["seconds"] for event in tail(folder.events) if event.get("kind") == "checkpoint"]
    number = next((n for n, stage in enumerate(stages) if stage.name == STAGES["training"]), None)
    if number is not None and saves:
        stages[number].seconds = max(0.0, stages[number].seconds - sum(saves))
        stages.insert(number + 1, Stage("save", sum(saves)))
    if number is not None:
        steps = _status(folder).get("step") or 0
        stages[number].found = f"{steps} step{'' if steps == 1 else 's'} on real data"
    return stages


def _judge(stage: Stage, check: dict[str, Any]) -> None:
    """By the run's own decode check."""
    stage.found = f"{check['blocks']} blocks; by decoding and by the training path alike"
    if check["flagged"]:
        stage.failed = "decoding and training draft different tokens from the same weights"
        stage.remedy = "this is a fault of the program or of a kernel: try train.kernels=plain, and report it"


def _status(folder: RunFolder) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(folder.status.read_text())
    return values


def _export(root: Path) -> str:
    export = importlib.import_module("draftmill.run.evaluate")  # a missing package is this stage's failure
    path, drafter = export.export_run(root, root / "export", dtype="bfloat16", overwrite=True)
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return f"{len(drafter.state_dict())} tensors, {size / 1e6:,.1f} MB"


def _check(root: Path) -> str:
    from draftmill.run.evaluate import check_run_export

    report = check_run_export(root, root / "export")
    return f"{report.tensors} tensors equal, outputs over {report.context_tokens} context tokens equal"


def in_words(error: Exception) -> tuple[str, str]:
    """(what went wrong, what helps). What nobody foresaw also prints its traceback."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, UserError):
        return text, ""  # it names its remedy itself
    if isinstance(error, MemoryError) or "out of memory" in text:
        return text, "lower data.token_budget or train.anchors, or give target and drafter different devices"
    if isinstance(error, ModuleNotFoundError):
        return text, f"pip install {error.name}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return text, "free space on the disk of run_dir"
    traceback.print_exception(error)
    return f"{type(error).__name__}: {text}", "the traceback above says where; `draftmill doctor CONFIG` may say why"


def _print(done: DryRun, peaks: Peaks, console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("seconds", justify="right")
    table.add_column("", overflow="fold")
    for stage in done.stages:
        words = ["ok", stage.found] if stage.failed is None else ["FAILED", stage.failed, stage.remedy]
        table.add_row(stage.name, f"{stage.seconds:.1f}", escape(": ".join(word for word in words if word)))
    console.print(table)
    for line in (*memory_lines(peaks), NO_SPEED, _last_line(done)):
        console.print(escape(line), highlight=False)


def memory_lines(peaks: Peaks) -> Iterator[str]:
    yield f"peak memory: host {peaks.host_bytes / 1e9:.2f} GB, all processes together"
    for device, (used, total) in sorted(peaks.gpus.items()):
        yield f"peak memory: {device} {used / 1e9:.2f} of {total / 1e9:.2f} GB, whoever uses it"
    if peaks.blind:
        yield "peak memory of the GPUs is unknown: pip install nvidia-ml-py"


def _last_line(done: DryRun) -> str:
    if done.failed:
        return f"the dry run failed; what it left is in {done.folder.root}"
    return "the dry run went well, and its folder is removed. The same command without --dry-run trains"
