"""The target workers as a group: started, started anew with growing pauses when they end, given up on at a limit."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from draftmill.errors import UserError
from draftmill.run.console import say
from draftmill.run.events import EventLog
from draftmill.run.launch_local import Worker
from draftmill.run.target_worker import TargetJob, TargetWorker

MAX_RESTARTS = 5  # in a row, without a batch in between
FIRST_PAUSE_SECONDS = 1.0


@dataclass(slots=True)
class Seat:
    """One target's place. restarts: in a row. start_at: when to start anew, of `time.monotonic`. ended: why its last
    process did. given_up: whether it is not started any more."""

    name: str
    job: TargetJob
    worker: Worker | None = None
    loaded: bool = False
    restarts: int = 0
    start_at: float = 0.0
    ended: str | None = None
    given_up: bool = False


class TargetGroup:
    def __init__(self, jobs: list[TargetJob], events: EventLog, stacks_folder: Path) -> None:
        self.seats = [Seat(job.name, job) for job in jobs]
        self.restarts = 0
        self._events, self._stacks_folder = events, stacks_folder

    def start_due(self) -> None:
        """Start every seat that has no worker and whose pause is over."""
        for seat in self.seats:
            if seat.worker is None and not seat.given_up and time.monotonic() >= seat.start_at:
                seat.worker = Worker(seat.name, TargetWorker, seat.job, self._stacks_folder)
                seat.loaded = False

    def seat_of(self, worker: Worker) -> Seat | None:
        return next((seat for seat in self.seats if seat.worker is worker), None)

    def working(self) -> list[Seat]:
        """Seats whose target is loaded."""
        return [seat for seat in self.seats if seat.worker is not None and seat.loaded]

    def lost(self, seat: Seat) -> None:
        """Its process is gone. Raises UserError when nothing would be gained by another try."""
        assert seat.worker is not None
        reason, broken = seat.worker.end(), seat.worker.broken
        seat.worker.close()
        seat.worker = None
        if broken is not None and broken.user_error:
            raise UserError(reason)
        if broken is not None:
            say(broken.traceback.rstrip())
        cannot_load = broken is not None and not seat.loaded and reason == seat.ended  # the same error, twice
        seat.ended = reason
        seat.restarts += 1
        if cannot_load or seat.restarts > MAX_RESTARTS:
            self._give_up(seat, reason)
            return
        self.restarts += 1
        pause = FIRST_PAUSE_SECONDS * 2.0 ** (seat.restarts - 1)
        seat.start_at = time.monotonic() + pause
        say(f"warning: {seat.name} ended ({reason}); its batches go to others, it starts anew in {pause:g} s")
        self._events.add("restart", f"{seat.name} starts anew: {reason}", worker=seat.name, reason=reason)

    def _give_up(self, seat: Seat, reason: str) -> None:
        seat.given_up = True
        if all(other.given_up for other in self.seats):
            raise UserError(
                f"the run stopped: no target is left; {seat.name} ended {seat.restarts} times in a row: {reason}"
            )
        say(
            f"warning: {seat.name} ended {seat.restarts} times in a row ({reason}) and is given up; the run goes on "
            "with the others, more slowly"
        )
