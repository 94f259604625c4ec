"""What the supervisor makes of its workers' signs of life: the status, who waits, who stalls, who is to be ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from draftmill.run.coordinator import Coordinator
from draftmill.run.drafters import DrafterGroup
from draftmill.run.launch_local import Worker
from draftmill.run.stalls import Observed, Stalls, awaited, can_be_ended, hangs
from draftmill.run.targets import TargetGroup
from draftmill.run.waits import Waits

LOOK_SECONDS = 0.5
WRITE_SECONDS = 1.0
QUIET_SECONDS = 300.0  # for a process to import what it needs, or to end: meanwhile it gives no sign of life


class Oversight:
    """changed: is told the state at most once a second, and at once where a phase changes."""

    def __init__(
        self,
        targets: TargetGroup | None,
        drafters: DrafterGroup,
        coordinator: Coordinator | None,
        stalls: Stalls,
        *,
        lease_seconds: float,
        hang_seconds: float,
        changed: Callable[[dict[str, Any]], None],
    ) -> None:
        self._targets, self._drafters, self._coordinator, self._stalls = targets, drafters, coordinator, stalls
        self._lease_seconds, self._hang_seconds, self._changed = lease_seconds, hang_seconds, changed
        self._waits = Waits()
        self._looked = self._written = 0.0

    def workers(self) -> list[Worker]:
        return self._target_workers() + list(self._drafters.living)

    def turn(self, now: float) -> list[tuple[Worker, str]]:
        """Look and tell, if it is time. Returns who is to be killed, and why in words."""
        news = [worker for worker in self.workers() if worker.take_news()]
        ailing = []
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._stalls.look(self._observed(now))
            ailing = self._ailing(now)
        if news or now - self._written >= WRITE_SECONDS:
            self.tell()
        return ailing

    def tell(self) -> None:
        """What each worker does, and the queue, for the status file."""
        now = self._written = time.monotonic()
        all_ = self._observed(now)
        self._changed(
            {
                "workers": {one.name: as_status(one, self._stalls, all_) for one in all_},
                "slots_in_use": self._slots_in_use(),
                "restarts": self._drafters.restarts + (0 if self._targets is None else self._targets.restarts),
            }
        )

    def read_waits(self) -> dict[str, Any]:
        return {
            "targets_wait": self._waits.share("targets", self._target_workers()),
            "drafters_wait": self._waits.share("drafters", list(self._drafters.living)),
            "slots_in_use": self._slots_in_use(),
        }

    def _target_workers(self) -> list[Worker]:
        seats = [] if self._targets is None else self._targets.seats
        return [seat.worker for seat in seats if seat.worker is not None]

    def _observed(self, now: float) -> list[Observed]:
        return [worker.observed(now) for worker in self.workers()]

    def _slots_in_use(self) -> int | None:
        return None if self._coordinator is None else self._coordinator.in_flight

    def _ailing(self, now: float) -> list[tuple[Worker, str]]:
        in_the_way = set() if self._coordinator is None else self._coordinator.blocking()
        all_ = self._observed(now)
        found = []
        for worker, one in zip(self.workers(), all_, strict=True):
            beats = worker.has_spoken and worker.name not in self._drafters.ended
            patience = 2 * self._lease_seconds if beats else QUIET_SECONDS
            if hangs(one, all_, self._hang_seconds):
                found.append((worker, f"has done nothing for {one.still:.0f} s"))
            elif worker.name in in_the_way or one.silent > patience:
                found.append((worker, f"has been silent for {one.silent:.0f} s"))
        return [(worker, what) for worker, what in found if can_be_ended(worker.observed(now))]


def as_status(one: Observed, stalls: Stalls, all_: list[Observed]) -> dict[str, Any]:
    """A process's entry in the status file; times since 1970."""
    now, beat = time.time(), one.beat
    missing = [other.name for other in awaited(one, all_)] if beat.phase == "all-reduce" else []
    return {
        "phase": beat.phase,
        "since": round(now - beat.in_phase - one.silent, 3),
        "pid": one.pid,
        "device": one.device,
        "doing": f"waits for {', '.join(missing)}" if missing else beat.what,
        "moved": round(now - one.moved, 3),
        "stalled": stalls.sentence(one.name),
    }
