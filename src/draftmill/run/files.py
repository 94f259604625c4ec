"""The folder of a run: who may write it, what is in it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from draftmill.errors import UserError

LOCK_TRIES, LOCK_PAUSE_SECONDS = 20, 0.05  # `is_locked`, asked by others, holds the lock for a moment


class RunFolder:
    """Paths of a run. `draftmill status` and friends need nothing but these files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.provenance = root / "run.json"
        self.status = root / "status.json"
        self.ledger = root / "ledger.jsonl"
        self.metrics = root / "metrics.jsonl"
        self.events = root / "events.jsonl"
        self.tensorboard = root / "tensorboard"
        self.checkpoints = root / "checkpoints"
        self.evaluation = root / "evaluation.json"
        self.report = root / "report.png"
        self.stray = root / "stderr.log"  # what processes wrote past the live view of a terminal
        self._lock = root / "lock"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one run. The kernel frees the lock when the process ends, however it ends."""
        self.root.mkdir(parents=True, exist_ok=True)
        with self._lock.open("a+") as file:
            if not _lock(file):
                file.seek(0)
                raise UserError(
                    f"{self.root} is in use by a run that is still going (process {file.read().strip() or 'unknown'}); "
                    "wait for it, stop it, or choose another run_dir"
                )
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def is_locked(self) -> bool:
        """Whether a living process holds the run."""
        return self.holder() is not None

    def holder(self) -> int | None:
        """The living process that holds the run; 0 where it has not said its number yet."""
        try:
            with self._lock.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    number = file.read().strip()
                    return int(number) if number.isdecimal() else 0
        except (FileNotFoundError, NotADirectoryError):
            pass
        return None

    def locked_since(self) -> float:
        """When the run that holds it took it, in seconds since 1970."""
        return self._lock.stat().st_mtime

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines of metrics.jsonl."""
        if not self.metrics.exists():
            return []
        rows = []
        for line in self.metrics.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:  # the line a kill cut short
                continue
        return rows

    def cut_metrics(self, step: int) -> None:
        """Drop lines behind `step`: the steps that a resumed run makes again."""
        kept = [row for row in self.read_metrics() if row["step"] <= step]
        write_atomically(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))


def _lock(file: IO[str]) -> bool:
    """Whether the lock is ours now."""
    for left in reversed(range(LOCK_TRIES)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if left:
                time.sleep(LOCK_PAUSE_SECONDS)
    return False


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old or the new text, never a part."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text)
    temporary.replace(path)
