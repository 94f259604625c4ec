"""Finds processes that have made no progress for much longer than is usual, says what it looks like, keeps their
stacks.

It is too long after ten times what the activity usually took in this process (the median), three times the longest it
took, or three times what the phase usually takes on this machine, and never before `FLOOR_SECONDS`; where a run ends a
worker that hangs, no later than half of the time after which it does. Who waits for work, or in an all-reduce for a
rank that is on its way, does not stall: it is for the other to be named.
"""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from draftmill.run import stacks
from draftmill.run.console import say
from draftmill.run.events import EventLog
from draftmill.run.messages import Beat
from draftmill.run.usual import Kind, machine, usual

TIMES_USUAL, TIMES_LONGEST, TIMES_EARLIER_RUNS = 10.0, 3.0, 3.0
STEADY_FLOOR_SECONDS = 20.0
FLOOR_SECONDS = {
    "starting": 120.0, "loading": 120.0, "compiling": 300.0, "warming up": 300.0, "saving": 60.0, "checking": 300.0,
    "stopping": 60.0, "profiling": 300.0,
}  # fmt: skip
ENDABLE = ("warming up", "working", "all-reduce", "saving")  # phases in which a hanging worker may be ended
SILENT_SECONDS = 20.0  # signs of life come once a second
QUIET_SECONDS = 3.0  # of silence that no busy machine explains: is it stopped?
SAMPLE_SECONDS = 1.0  # over which CPU time and written bytes are looked at
BUSY = 0.05  # of a core
LITTLE_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Observed:
    """A process and what it said last. silent: seconds since. answers: whether it writes its stacks when asked."""

    name: str
    pid: int
    device: str
    beat: Beat
    silent: float
    answers: bool
    stacks: Path

    @property
    def still(self) -> float:
        """Seconds without progress with work to do."""
        return 0.0 if self.beat.still is None else self.beat.still + self.silent

    @property
    def moved(self) -> float:
        """Seconds since its last progress, with work to do or without."""
        return self.beat.moved + self.silent

    @property
    def drafts(self) -> bool:
        return self.name.startswith("drafter-")


@dataclass(frozen=True, slots=True)
class _Sample:
    time: float
    cpu: float
    written: int | None


@dataclass(slots=True)
class _Stall:
    """seconds: that it had stood still when it was last looked at."""

    pid: int
    where: str
    why: str
    seconds: float


class Stalls:
    """root: the run's folder. target: its model. hang_seconds: after which the run ends a worker; None where it
    cannot."""

    def __init__(self, root: Path, events: EventLog, target: str, hang_seconds: float | None) -> None:
        self._root, self._events, self._target, self._hang_seconds = root, events, target, hang_seconds
        self._in_earlier_runs = functools.cache(usual)
        self._stalls: dict[str, _Stall] = {}
        self._samples: dict[str, _Sample] = {}

    def look(self, all_: Sequence[Observed]) -> None:
        """Once or twice a second, with all processes that there are."""
        pids = {one.name: one.pid for one in all_}
        self._stalls = {name: stall for name, stall in self._stalls.items() if pids.get(name) == stall.pid}
        for one in all_:
            if not self._too_long(one, all_):
                self._samples.pop(one.name, None)
                self._goes_on(one)
            elif one.name in self._stalls:
                self._stalls[one.name].seconds = lasting(one)
            else:
                self._suspect(one, all_)

    def sentence(self, name: str) -> str | None:
        """For the status: None while it does not stall."""
        stall = self._stalls.get(name)
        return None if stall is None else f"{_duration(stall.seconds)} {stall.where}: {stall.why}"

    def overslept(self, one: Observed) -> None:
        """A process finds that it could not even look after itself for long: too late to see why, but not to say so."""
        self._report(one, "it was stopped by a signal, or C code held the interpreter: nothing of it could run")

    def _too_long(self, one: Observed, all_: Sequence[Observed]) -> bool:
        if (one.answers and one.silent > SILENT_SECONDS) or (one.silent > QUIET_SECONDS and stacks.is_stopped(one.pid)):
            return True
        return not awaited(one, all_) and one.still > self._limit(one)

    def _limit(self, one: Observed) -> float:
        kind = Kind(one.beat.phase, one.name.split("-")[0], self._target, machine(one.device))
        return limit_seconds(one.beat, self._in_earlier_runs(kind), self._hang_seconds)

    def _suspect(self, one: Observed, all_: Sequence[Observed]) -> None:
        """Look twice, and say what lies between."""
        state = stacks.state_of(one.pid)
        if state == "gone":
            return  # its end is noticed elsewhere
        before = self._samples.setdefault(one.name, _sample(one.pid))
        if stacks.is_stopped(one.pid):
            self._report(one, f"stopped by a signal; `kill -CONT {one.pid}` continues it{_waiting(one, all_)}")
        elif time.monotonic() - before.time >= SAMPLE_SECONDS:
            self._report(one, self._why(one, all_, state, before, _sample(one.pid)) + _waiting(one, all_))

    def _why(self, one: Observed, all_: Sequence[Observed], state: str, before: _Sample, after: _Sample) -> str:
        seconds = after.time - before.time
        free = shutil.disk_usage(self._root).free
        saving = one.beat.phase == "saving"
        if saving and free < LITTLE_BYTES:
            return f"the disk of {self._root} is full ({free / 1e6:.0f} MB free)"
        if saving and before.written is not None and after.written is not None:
            return f"slow disk: {(after.written - before.written) / seconds / 1e6:.1f} MB/s are written"
        if state == "disk-sleep":
            return "it waits for a disk or a network drive"
        if one.beat.phase == "all-reduce":
            return "all ranks are in it: what connects them hangs"
        return _by_cpu(one, (after.cpu - before.cpu) / seconds)

    def _report(self, one: Observed, why: str) -> None:
        where, seconds = place(one), lasting(one)
        self._stalls[one.name] = _Stall(one.pid, where, why, seconds)
        text = f"stalled: {one.name}, {_duration(seconds)} {where}: {why}"
        stacks.ask(one.pid, one.stacks, text, answers=one.answers)
        say(f"{text}; stacks in {one.stacks}")
        self._events.add(
            "stalled", text.removeprefix("stalled: "), worker=one.name, seconds=round(seconds, 1),
            phase=one.beat.phase, doing=one.beat.what, stacks=str(one.stacks.relative_to(self._root)),
        )  # fmt: skip

    def _goes_on(self, one: Observed) -> None:
        stall = self._stalls.pop(one.name, None)
        if stall is not None:
            text = f"{one.name} moves again, after {_duration(stall.seconds)}"
            say(text)
            self._events.add("moving", text, worker=one.name, seconds=round(stall.seconds, 1))


def limit_seconds(beat: Beat, in_earlier_runs: float | None, hang_seconds: float | None) -> float:
    """How long the activity may take, by the rule at the top. in_earlier_runs: what its phase took."""
    here = max(TIMES_USUAL * (beat.usual or 0.0), TIMES_LONGEST * beat.longest)
    earlier = TIMES_EARLIER_RUNS * (in_earlier_runs or 0.0)
    floor = FLOOR_SECONDS.get(beat.activity, FLOOR_SECONDS.get(beat.phase, STEADY_FLOOR_SECONDS))
    limit = max(floor, here, earlier)
    return min(limit, hang_seconds / 2) if hang_seconds is not None and beat.phase in ENDABLE else limit


def awaited(one: Observed, all_: Sequence[Observed]) -> list[Observed]:
    """In an all-reduce: the ranks that have not got there, or have fallen silent."""
    if one.beat.activity != "all-reduce":
        return []
    ranks = [other for other in all_ if other.drafts and other is not one]
    return [other for other in ranks if other.beat.activity != "all-reduce" or other.silent > QUIET_SECONDS]


def hangs(one: Observed, all_: Sequence[Observed], hang_seconds: float) -> bool:
    """Whether a worker is to be ended for getting no further."""
    return one.beat.phase in ENDABLE and one.still > hang_seconds and not awaited(one, all_)


def can_be_ended(one: Observed) -> bool:
    """Not while the kernel waits for a disk on its behalf: not even SIGKILL ends it then, and its end is waited for."""
    return stacks.state_of(one.pid) != "disk-sleep"


def place(one: Observed) -> str:
    """in forward of batch 812 (usual 0.4 s)"""
    beat = one.beat
    if beat.still is None:
        return f"without a sign of life, last {beat.activity}"
    what = f" of {beat.what}" if beat.what and beat.activity != beat.phase else f" {beat.what}" if beat.what else ""
    usual = "" if beat.usual is None else f" (usual {beat.usual:.2g} s)"
    return f"in {beat.activity}{what}{usual}"


def lasting(one: Observed) -> float:
    """Seconds that it has stood still."""
    return one.silent if one.beat.still is None else one.still


def _waiting(one: Observed, all_: Sequence[Observed]) -> str:
    """Who waits for it in an all-reduce."""
    names = [other.name for other in all_ if one in awaited(other, all_)]
    return f"; {', '.join(names)} wait{'s' if len(names) == 1 else ''} for it in all-reduce" if names else ""


def _by_cpu(one: Observed, cores: float) -> str:
    quiet = one.answers and one.silent > QUIET_SECONDS
    silent = "; its signs of life do not come, so C code holds the interpreter" if quiet else ""
    if cores < BUSY:
        return f"asleep, it uses no CPU{silent}"
    spins = ", or waits for the GPU" if one.device.startswith("cuda") else ""
    return f"busy with {cores:.1f} cores: it computes{spins}{silent}"


def _sample(pid: int) -> _Sample:
    process = psutil.Process(pid)
    times = process.cpu_times()
    try:
        written = int(process.io_counters().write_bytes)
    except (psutil.AccessDenied, NotImplementedError):
        written = None
    return _Sample(time.monotonic(), times.user + times.system, written)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s"
