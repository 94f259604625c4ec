"""Progress of preparing: a live bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 30.0


class PrepareProgress:
    """Use as a context manager; call `update` after each chunk. Writes to stderr only."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._started = self._last_line = time.monotonic()
        console = Console(stderr=True)
        self._live = console.is_terminal
        self._bar = Progress(
            TextColumn("preparing"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("reading", total=total_bytes)

    def __enter__(self) -> PrepareProgress:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    def update(self, read_bytes: int, rows: int, dropped: int) -> None:
        now = time.monotonic()
        text = f"{rows:,} rows, {dropped:,} dropped, {rows / max(now - self._started, 1e-9):,.0f} rows/s"
        if self._live:
            self._bar.update(self._task, completed=read_bytes, description=text)
        elif now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            print(f"preparing: {read_bytes / max(self._total_bytes, 1):.0%}, {text}", file=sys.stderr, flush=True)
