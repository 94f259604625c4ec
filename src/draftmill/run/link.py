"""A worker's end of its line to the supervisor: messages both ways, signs of life, and no life after its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from draftmill.errors import UserError
from draftmill.run.messages import Beat, Broken, Phase

BEAT_SECONDS = 1.0
ASKING = (signal.SIGINT, signal.SIGTERM)  # signals that ask a run to end
_PR_SET_PDEATHSIG = 1


class SupervisorGone(BaseException):
    """The supervisor has closed the line: there is nobody to work for."""


class Link:
    """send and receive; a thread of its own says every second that the worker lives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._progress, self._busy, self._waiting = 0, 0.0, 0.0
        self._asleep_since: float | None = None
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def send(self, message: Any) -> None:
        with self._sending:
            try:
                self._connection.send(message)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise SupervisorGone from error

    def receive(self, *, idle: bool = False) -> Any:
        """The next message; sleeps until there is one. idle: the time counts as waiting for work."""
        try:
            if idle:
                self._asleep_since = time.monotonic()
            return self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise SupervisorGone from error
        finally:
            if self._asleep_since is not None:
                self._waiting += time.monotonic() - self._asleep_since
                self._asleep_since = None

    def pending(self) -> bool:
        """Whether `receive` would return at once."""
        return self._connection.poll()

    def phase(self, name: str) -> None:
        self.send(Phase(name))

    def moved(self, seconds: float = 0.0) -> None:
        """Something was done. seconds: of work in steady state."""
        self._progress += 1
        self._busy += seconds

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self.send(Beat(self._progress, self._busy, self._total_waiting()))
            except (SupervisorGone, OSError):
                return

    def _total_waiting(self) -> float:
        since = self._asleep_since
        return self._waiting + (0.0 if since is None else time.monotonic() - since)


def work(connection: Connection, supervisor: int, body: Callable[[Link], None]) -> None:
    """Run a worker's `body` with its link; report how it broke, if it did. Every worker process begins here."""
    die_with(supervisor)
    for kind in ASKING:  # Ctrl-C reaches all processes of a terminal; the supervisor decides
        signal.signal(kind, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    link = Link(connection)
    try:
        body(link)
        _leave(0)
    except SupervisorGone:
        _leave(1)
    except UserError as error:
        _last_word(link, Broken(str(error), user_error=True))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        _last_word(link, Broken(f"{type(error).__name__}: {error}".splitlines()[0], user_error=False, traceback=text))


def _last_word(link: Link, message: Broken) -> None:
    with contextlib.suppress(SupervisorGone):
        link.send(message)
    _leave(1)


def _leave(code: int) -> None:
    """End at once: threads and compile pools of libraries are not waited for, everything of ours is written already."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with(supervisor: int) -> None:
    """Have the kernel kill this process when the supervisor ends, even while it is stopped or deep in a computation."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # it ended before the line above
        sys.exit(1)
