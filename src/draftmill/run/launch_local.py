"""Worker processes of this host, as the supervisor sees them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from draftmill.run import stacks
from draftmill.run.link import ASKING, Link, work
from draftmill.run.messages import Beat, Broken
from draftmill.run.stalls import Observed

NAME = "draftmill "  # of every worker process, before its own
NOT_HEARD = Beat("starting", 0.0, "starting", None, 0.0, 0.0, None, 0.0, 0.0, 0.0)
_spawned = multiprocessing.get_context("spawn")  # never forked: CUDA and threads do not survive a fork


class Body(Protocol):
    """A worker's work: made in its own process from the link and its job. first: see `Activity`."""

    first: str

    def __init__(self, link: Link, job: Any) -> None: ...

    def run(self) -> None: ...


class Worker:
    """A process, its line, and what it said last. Times are of `time.monotonic`.

    stacks: the folder for its stacks. news: whether its phase has changed since `take_news` was called.
    """

    def __init__(self, name: str, body: type[Body], job: Any, stacks_folder: Path) -> None:
        self.name, self.device = name, str(job.device)
        self.beat = NOT_HEARD
        self.heard = time.monotonic()
        self.has_spoken, self._news = False, True
        self.broken: Broken | None = None
        self.stacks = stacks.new_file(stacks_folder, name)
        self.connection, theirs = _spawned.Pipe()
        arguments = (theirs, os.getpid(), self.stacks, body, job)
        self.process = _spawned.Process(target=_main, args=arguments, name=NAME + name)
        with _undisturbed():
            self.process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        """To a worker that has just died nothing is sent: its end is noticed elsewhere."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def messages(self) -> list[Any]:
        """All that has come. Phases, beats and last words are noted here and also returned."""
        came: list[Any] = []
        try:
            while self.connection.poll():
                came.append(self.connection.recv())
                self._note(came[-1])
        except (EOFError, ConnectionResetError, OSError):  # it is gone; its end is noticed by the sentinel
            pass
        return came

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped process, and wait until it is gone: it writes nowhere any more."""
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self.connection.close()
        self.process.close()

    @property
    def phase(self) -> str:
        return self.beat.phase

    def observed(self, now: float) -> Observed:
        return Observed(
            name=self.name,
            pid=int(self.process.pid or 0),
            device=self.device,
            beat=self.beat,
            silent=now - self.heard,
            answers=self.has_spoken,
            stacks=self.stacks,
        )

    def take_news(self) -> bool:
        """Whether its phase has changed since the last call."""
        news, self._news = self._news, False
        return news

    def end(self) -> str:
        """Why a dead worker died, in words."""
        if self.broken is not None:
            return self.broken.reason
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"exit code {code}"
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"

    def _note(self, message: Any) -> None:
        self.heard, self.has_spoken = time.monotonic(), True
        if isinstance(message, Beat):
            self._news = self._news or message.phase != self.beat.phase
            self.beat = message
        elif isinstance(message, Broken):
            self.broken = message


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals wait. A new process inherits that, so Ctrl-C does not break into its imports; `work` ends it there."""
    resource_tracker.ensure_running()  # started later, it would let them through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill_strays() -> None:
    """End workers that nobody holds: an interrupt came while they were being started."""
    for process in multiprocessing.active_children():
        if process.name.startswith(NAME):
            process.kill()
            process.join()


def _main(connection: Connection, supervisor: int, stacks_file: Path, body: type[Body], job: Any) -> None:
    work(connection, supervisor, stacks_file, body.first, lambda link: body(link, job).run())
