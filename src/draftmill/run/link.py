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
from pathlib import Path
from typing import Any

from draftmill.errors import UserError
from draftmill.run import stacks
from draftmill.run.activity import Activity
from draftmill.run.compiles import Compiles, listen
from draftmill.run.console import relay
from draftmill.run.messages import Broken, Note, Recompiled

BEAT_SECONDS = 1.0
ASKING = (signal.SIGINT, signal.SIGTERM)  # signals that ask a run to end
_PR_SET_PDEATHSIG = 1


class SupervisorGone(BaseException):
    """The supervisor has closed the line: there is nobody to work for."""


class Link:
    """send and receive; a thread of its own says every second that the worker lives, and what it does.

    first: see `Activity`.
    """

    def __init__(self, connection: Connection, first: str) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self.activity = Activity(first, self._beat)
        self._beat()
        threading.Thread(target=self._beat_on, daemon=True, name="heartbeat").start()

    def send(self, message: Any) -> None:
        with self._sending:
            self._send(message)

    def receive(self) -> Any:
        """The next message; sleeps until there is one."""
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise SupervisorGone from error

    def pending(self) -> bool:
        """Whether `receive` would return at once."""
        return self._connection.poll()

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise SupervisorGone from error

    def _beat(self) -> None:
        with self._sending:  # two threads beat: what is said later must also arrive later
            self._send(self.activity.beat())

    def _beat_on(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self._beat()
            except (SupervisorGone, OSError):
                return


def report_compiles(link: Link, device: str) -> None:
    """From now on, in this process."""
    if device.startswith("cuda"):
        listen(Compiles(link.activity, lambda what: link.send(Recompiled(what))))


def work(connection: Connection, supervisor: int, stacks_file: Path, first: str, body: Callable[[Link], None]) -> None:
    """Run a worker's `body` with its link; report how it broke, if it did. Every worker process begins here."""
    die_with(supervisor)
    stacks.answer_in(stacks_file)
    for kind in ASKING:  # Ctrl-C reaches all processes of a terminal; the supervisor decides
        signal.signal(kind, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    link = Link(connection, first)
    relay(lambda text: link.send(Note(text)))
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
