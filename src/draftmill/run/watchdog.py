"""The run in one process, seen by a thread of its own: what it does, once a second; stalls, with stacks."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from pathlib import Path
from types import TracebackType

from draftmill.run import stacks
from draftmill.run.activity import Activity
from draftmill.run.compiles import Compiles, listen
from draftmill.run.console import say
from draftmill.run.events import EventLog
from draftmill.run.link import BEAT_SECONDS
from draftmill.run.oversight import as_status
from draftmill.run.stalls import SILENT_SECONDS, Observed, Stalls
from draftmill.run.status import StatusWriter

NAME = "main"


class Watchdog:
    """Watches while it is entered. While C code holds the interpreter, the thread cannot run: then a clock in C, which
    the thread puts back every second, writes the stacks, and the stall is told afterwards."""

    def __init__(self, root: Path, target: str, device: str, status: StatusWriter, events: EventLog) -> None:
        self.activity = Activity("micro-step", self._tell)
        self._folder = root / "stacks"
        self._stacks = stacks.new_file(self._folder, NAME)
        self._device, self._status, self._events = device, status, events
        self._stalls = Stalls(root, events, target, hang_seconds=None)
        self._ended = threading.Event()
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def __enter__(self) -> Activity:
        stacks.answer_in(self._stacks)
        if self._device.startswith("cuda"):
            listen(Compiles(self.activity, self._recompiled))
        self._thread.start()
        return self.activity

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        stacks.stop_answering()
        stacks.sweep(self._folder)

    def _watch(self) -> None:
        last = time.monotonic()
        with self._stacks.open("a") as file:
            faulthandler.dump_traceback_later(SILENT_SECONDS, file=file)
            while not self._ended.wait(BEAT_SECONDS):
                faulthandler.dump_traceback_later(SILENT_SECONDS, file=file)  # put back
                now = time.monotonic()
                if now - last > BEAT_SECONDS + SILENT_SECONDS:
                    self._stalls.overslept(self._observed())
                last = now
                self._stalls.look([self._observed()])
                self._tell()
            faulthandler.cancel_dump_traceback_later()

    def _observed(self) -> Observed:
        beat = self.activity.beat()
        return Observed(NAME, os.getpid(), self._device, beat, 0.0, answers=True, stacks=self._stacks)

    def _tell(self) -> None:
        with self._telling:  # two threads tell: what is said later must also be written later
            one = self._observed()
            self._status.update(workers={NAME: as_status(one, self._stalls, [one])})

    def _recompiled(self, what: str) -> None:
        say(f"compiled {what}")
        self._events.add("recompiled", f"compiled {what}", worker=NAME, what=what)
