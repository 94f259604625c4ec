"""What a process does now: said by its working thread as it goes, read by the thread that tells others.

Saying so costs about a microsecond and nothing is sent for it. Only a change of phase that is rare is told at once.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from draftmill.run.messages import Beat

PHASES = (
    "starting", "loading", "compiling", "warming up", "working", "waiting for a slot", "waiting for a batch",
    "waiting for the target", "all-reduce", "saving", "checking", "stopping",
)  # fmt: skip
WAITING = ("waiting for a slot", "waiting for a batch", "waiting for the target")
PASSING = ("waiting for a slot", "waiting for a batch", "all-reduce")  # many times a second, if all is well
STEADY = ("working", *PASSING)
SHOWN_AFTER_SECONDS = 2.0  # a passing phase that is shorter belongs to the work
KEPT = 33  # durations of each activity


class _Now(NamedTuple):
    """name: a phase, or a kind of work such as "forward". began: it or its last progress, of `time.monotonic`. moved:
    the last progress of any kind. waited: seconds so far, from `steady` on, the beginning of the first batch."""

    name: str
    what: str | None
    phase: str
    began: float
    moved: float
    waited: float
    steady: float | None


class Activity:
    """One per process. first: the kind of work whose first piece compiles and warms up.

    on_change is called by the working thread when the phase changes, but not from one to another of `STEADY`.
    """

    def __init__(self, first: str, on_change: Callable[[], None]) -> None:
        self.warm = False
        self._first, self._on_change = first, on_change
        now = time.monotonic()
        self._now = _Now("starting", None, "starting", now, now, 0.0, None)  # replaced as a whole: readers see one
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._shown, self._shown_since = "starting", now
        self._reading = threading.Lock()

    def enter(self, name: str, what: str | None = None) -> None:
        """From now on: a phase by its name, or a piece of work. what: which one, or how far, as a short text."""
        now, old = time.monotonic(), self._now
        waited, moved, steady = old.waited, old.moved, old.steady
        if old.phase in WAITING:
            waited += now - old.began if steady is not None else 0.0
        else:
            moved = now
            self._left(old.name, now - old.began)
        if name == self._first and steady is None:
            steady = now
        phase = name if name in PHASES else "working" if self.warm else "warming up"
        self._now = _Now(name, what, phase, now, moved, waited, steady)
        if phase != old.phase and not (phase in STEADY and old.phase in STEADY):
            self._on_change()

    def further(self, what: str) -> None:
        """Progress within what it does."""
        now = time.monotonic()
        self._now = self._now._replace(what=what, began=now, moved=now)

    def beat(self) -> Beat:
        """All of it, as of now."""
        with self._reading:
            own, now = self._now, time.monotonic()
            waits = own.phase in WAITING
            self._show(own, now)
            durations = list(self._durations.get(own.name, ()))
            in_steady_state = own.steady is not None
            return Beat(
                phase=self._shown,
                in_phase=now - self._shown_since,
                activity=own.name,
                what=own.what,
                still=None if waits else now - own.began,
                moved=now - own.moved,
                usual=statistics.median(durations) if durations else None,
                longest=max(durations, default=0.0),
                waited=own.waited + (now - own.began if waits and in_steady_state else 0.0),
                steady=0.0 if own.steady is None else now - own.steady,
            )

    def _left(self, name: str, seconds: float) -> None:
        if name == self._first and not self.warm:
            self.warm = True  # its first piece is no measure for the others
        elif self.warm:
            self._durations[name].append(seconds)

    def _show(self, own: _Now, now: float) -> None:
        """A wait of a moment is not worth a change of phase."""
        passing = own.phase in PASSING and now - own.began < SHOWN_AFTER_SECONDS
        phase = own.phase if not passing else "working" if self.warm else "warming up"
        if phase != self._shown:
            self._shown, self._shown_since = phase, own.began
