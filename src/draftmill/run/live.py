"""What `train` shows while it goes: a live view on a terminal, below every line that is said; in a log file a line
whenever nothing was said for a while.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live

from draftmill.run.background import repeated
from draftmill.run.console import say, set_live, silent_seconds
from draftmill.run.events import tail
from draftmill.run.files import RunFolder
from draftmill.run.status import StatusWriter, complete
from draftmill.run.status_view import headline
from draftmill.run.watch import view

FRAME_SECONDS, SLOWEST_SECONDS = 1.0, 5.0
MOST_SHARE = 0.004  # of the time may go into drawing while this process trains
SILENCE_SECONDS = 30.0
NOT_PRINTED = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f]")  # escape sequences, control characters

Row = dict[str, Any]


@contextmanager
def shown(folder: RunFolder, status: StatusWriter) -> Iterator[None]:
    """While it is entered, people see where the run is."""
    now = Now(folder, status)
    live = sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    with on_terminal(folder, now) if live else in_log(now):
        yield


class Now:
    """The status of the run in this process: without reading a file that has not changed."""

    def __init__(self, folder: RunFolder, status: StatusWriter) -> None:
        self._folder, self._status = folder, status
        self._events: list[Row] = []
        self._events_size = -1

    def is_training(self) -> bool:
        return self._status.current == "training"

    def status(self) -> tuple[Row, list[Row]]:
        """As `read_status` has it, and the log lines of this session."""
        values, rows = self._status.snapshot()
        with contextlib.suppress(OSError):
            if (size := self._folder.events.stat().st_size) != self._events_size:
                self._events, self._events_size = tail(self._folder.events), size
        return complete(values, self._folder, rows=rows, events=self._events, alive=True), rows


@contextmanager
def in_log(now: Now) -> Iterator[None]:
    """A line about what goes on whenever nothing was said for half a minute."""

    def remind() -> None:
        if silent_seconds() >= SILENCE_SECONDS:
            say(headline(now.status()[0], time.time()))

    with repeated("reminder", min(1.0, SILENCE_SECONDS), remind):
        yield


@contextmanager
def on_terminal(folder: RunFolder, now: Now) -> Iterator[None]:
    """The live view, below all lines. It is wiped at the end; the lines stay."""
    with _past_the_terminal(folder.stray) as (terminal, stray):
        console = Console(file=terminal)
        fit(console, terminal)

        def draw() -> RenderableType:
            status, rows = now.status()
            return view(status, rows, console.width, console.height - 1)

        live = Live(
            console=console, get_renderable=draw, auto_refresh=False, transient=True,
            redirect_stdout=stray.holds_stdout, redirect_stderr=True, vertical_overflow="crop",
        )  # fmt: skip
        ended = threading.Event()

        def go_on() -> None:
            pause = FRAME_SECONDS
            while not ended.wait(pause):
                began = time.thread_time()
                with contextlib.suppress(OSError):  # the terminal may be gone; the run is not
                    stray.show()
                    fit(console, terminal)
                    live.refresh()
                taken = (time.thread_time() - began) / MOST_SHARE
                pause = min(max(FRAME_SECONDS, taken), SLOWEST_SECONDS) if now.is_training() else FRAME_SECONDS

        thread = threading.Thread(target=go_on, daemon=True, name="live view")
        with live:
            set_live(True)
            live.refresh()
            thread.start()
            try:
                yield
            finally:
                ended.set()
                thread.join()
                stray.show()
                set_live(False)


def fit(console: Console, terminal: TextIO) -> None:
    """The console would take its size from stdout, which may be a file."""
    size = os.get_terminal_size(terminal.fileno())
    console.size = (size.columns, size.lines)


class _Stray:
    """What other processes, and libraries in C, write to stderr: kept in a file, and shown line by line."""

    def __init__(self, path: Path, holds_stdout: bool) -> None:
        self.holds_stdout = holds_stdout
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._rest = b""

    def show(self) -> None:
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            last = line.rstrip(b"\r").rpartition(b"\r")[2]  # of a progress bar: how it ended
            if text := NOT_PRINTED.sub("", last.decode(errors="replace")).strip():
                print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._file.close()


@contextmanager
def _past_the_terminal(path: Path) -> Iterator[tuple[TextIO, _Stray]]:
    """Where file descriptors 1 and 2 lead to a terminal, have them lead to the file, in this process and in those that
    it starts. Yields the terminal."""
    numbers = [number for number in (1, 2) if os.isatty(number)]
    kept = {number: os.dup(number) for number in numbers}
    terminal = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace")
    sys.stdout.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    stray = _Stray(path, 1 in numbers)
    for number in numbers:
        os.dup2(file, number)
    try:
        yield terminal, stray
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(file)
        stray.show()
        stray.close()
        terminal.close()
        if path.stat().st_size == 0:
            path.unlink()
