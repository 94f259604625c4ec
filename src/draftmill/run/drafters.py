"""The drafter ranks as a group: they live and die together, and start anew from the last checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from draftmill.errors import UserError
from draftmill.handoff.shared import RingShape
from draftmill.run.console import say
from draftmill.run.drafter_worker import DrafterJob, DrafterWorker
from draftmill.run.events import EventLog
from draftmill.run.launch_local import Worker
from draftmill.run.messages import Ended
from draftmill.train.checkpoint import find_latest

MAX_RESTARTS = 3  # in a row, without a checkpoint in between


class DrafterGroup:
    """generation: how often the group was started. handles: of slots in device memory, by worker."""

    def __init__(self, jobs: list[DrafterJob], events: EventLog, stacks_folder: Path) -> None:
        self.jobs = jobs
        self.generation = 0
        self.restarts = 0
        self.workers: list[Worker] = []
        self.handles: dict[str, bytes] = {}
        self.ended: dict[str, Ended] = {}
        self._left: set[str] = set()  # said Ended and went
        self._in_a_row = 0
        self._events, self._stacks_folder = events, stacks_folder

    @property
    def checkpoints(self) -> Path:
        return self.jobs[0].checkpoints

    @property
    def start_step(self) -> int:
        checkpoint = self.jobs[0].checkpoint
        return 0 if checkpoint is None else checkpoint.step

    @property
    def rings_wanted(self) -> bool:
        """Whether the slots lie in the drafters' device memory."""
        return isinstance(self.jobs[0].ring, RingShape)

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.name not in self._left]

    @property
    def all_saved(self) -> bool:
        """Every rank has said that it has saved its last step; rank 0 of an inline run may still be decoding."""
        return len(self.ended) == len(self.jobs)

    @property
    def all_ended(self) -> bool:
        return len(self._left) == len(self.jobs)

    def start(self) -> None:
        self.generation += 1
        self.ended, self.handles, self._left = {}, {}, set()
        rendezvous = self.jobs[0].rendezvous.with_name(f"rendezvous-{self.generation}")
        rendezvous.unlink(missing_ok=True)
        jobs = [replace(job, rendezvous=rendezvous) for job in self.jobs]
        self.workers = [Worker(job.name, DrafterWorker, job, self._stacks_folder) for job in jobs]

    def restart(self, reason: str) -> int:
        """Kill what is left, start from the last checkpoint, return its step. UserError when it is no use."""
        broken = next((w.broken for w in self.workers if w.broken is not None), None)
        self._kill()
        if broken is not None and broken.user_error:
            raise UserError(broken.reason)
        if broken is not None:
            say(broken.traceback.rstrip())
        self._in_a_row += 1
        self.restarts += 1
        if self._in_a_row > MAX_RESTARTS:
            raise UserError(
                f"the run stopped: the drafter ended {MAX_RESTARTS + 1} times without a new checkpoint; {reason}"
            )
        latest, _ = find_latest(self.checkpoints)
        self.jobs = [replace(job, checkpoint=latest) for job in self.jobs]
        self.start()
        for job in self.jobs:
            self._events.add("restart", f"{job.name} starts anew: {reason}", worker=job.name, reason=reason)
        return self.start_step

    def has(self, worker: Worker) -> bool:
        return worker in self.workers

    def rank_of(self, worker: Worker) -> int:
        return self.workers.index(worker)

    def gone(self, worker: Worker) -> bool:
        """Note that a process ended. True if it had said so."""
        if worker.name in self.ended:
            self._left.add(worker.name)
            worker.close()
        return worker.name in self._left

    def saved(self, step: int) -> None:
        if step > self.start_step:
            self._in_a_row = 0

    def tell(self, message: Any) -> None:
        for worker in self.living:
            worker.send(message)

    def all_handles(self) -> tuple[bytes, ...]:
        """By rank; empty while some are missing."""
        found = [self.handles[worker.name] for worker in self.workers if worker.name in self.handles]
        return tuple(found) if len(found) == len(self.jobs) else ()

    def outcome(self) -> Ended:
        """What rank 0 said; all ranks end at the same step."""
        steps = {ended.step for ended in self.ended.values()}
        assert len(steps) == 1, f"ranks ended at different steps: {self.ended}"
        return self.ended[self.workers[0].name]

    def clean(self) -> None:
        for path in self.jobs[0].rendezvous.parent.glob("rendezvous-*"):
            path.unlink(missing_ok=True)

    def _kill(self) -> None:
        for worker in self.living:
            worker.kill()
            worker.close()
        self.workers = []
