"""Sees a run of several processes through: gives out work, listens, replaces what dies, and ends everything it began.

One loop, driven by what the workers say and by their ends; it sleeps in between. It holds no tensors.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from draftmill.errors import UserError
from draftmill.run.coordinator import Coordinator
from draftmill.run.drafters import DrafterGroup
from draftmill.run.hooks import Hooks
from draftmill.run.launch_local import Worker, kill_strays
from draftmill.run.ledger import Ledger
from draftmill.run.messages import (
    Batch,
    Beat,
    Begun,
    Check,
    Checked,
    Done,
    Ended,
    Failed,
    Loaded,
    Log,
    Matrices,
    MayBegin,
    Note,
    Recompiled,
    Released,
    RingReady,
    Rings,
    Saved,
    Share,
    Shared,
    Stop,
    TargetFacts,
    Work,
)
from draftmill.run.oversight import Oversight
from draftmill.run.profiling import Requests, accept, asked
from draftmill.run.stalls import Stalls
from draftmill.run.targets import Seat, TargetGroup

LEASES = 2  # per target: one at work, one that it can begin without asking
TICK_SECONDS = 0.5  # how late the loop may notice a signal, a pause that is over or a silent worker
MAX_FAILURES = 3  # of one batch
STOP_SECONDS = 25.0  # for the drafters to finish their step and save


class Supervisor:
    """targets: None where the ranks run the target themselves; then there is no coordinator either."""

    def __init__(
        self,
        *,
        targets: TargetGroup | None,
        drafters: DrafterGroup,
        coordinator: Coordinator | None,
        ledger: Ledger,
        batches_per_step: int,
        lease_seconds: float,
        hang_seconds: float,
        check: bool,
        asked_to_stop: Callable[[], bool],
        interrupted: Callable[[], bool],
        stalls: Stalls,
        hooks: Hooks,
        requests: Requests,
    ) -> None:
        self.targets, self.drafters, self.coordinator, self.ledger = targets, drafters, coordinator, ledger
        self.batches_per_step, self.check = batches_per_step, check
        self.lease_seconds = lease_seconds
        self.asked_to_stop, self.interrupted, self.hooks = asked_to_stop, interrupted, hooks
        self.requests = requests
        self.facts: TargetFacts | None = None  # once embedding and head are in the shared memory
        self.oversight = Oversight(
            targets, drafters, coordinator, stalls,
            lease_seconds=lease_seconds, hang_seconds=hang_seconds, changed=hooks.changed,
        )  # fmt: skip
        self._facts_of: dict[str, TargetFacts] = {}  # by target
        self._sharing: str | None = None  # the target that writes embedding and head just now
        self._supplied = 0  # generation of drafters that has been told where embedding and head are
        self._made_by: dict[int, str] = {}  # batch → target, until it is trained
        self._stop_by: float | None = None
        self._may_begin = 0
        self._working = False  # the drafters train: before that, a stop has nothing to save
        self._checking = self._checked = False

    def run(self) -> Ended:
        """To the end of the schedule or to a stop. Whatever happens, no process is left."""
        try:
            self.drafters.start()
            while not (self.drafters.all_ended or (self.drafters.all_saved and self.interrupted())):
                if self.asked_to_stop() and not self._working:
                    return Ended(self.drafters.start_step, finished=False)
                self._turn()
            outcome = self.drafters.outcome()
            self.ledger.ended(outcome.step * self.batches_per_step)
            self._decode_check()
            return outcome
        finally:
            self._end_all()

    def _turn(self) -> None:
        if self.targets is not None:
            self.targets.start_due()
        self._listen()
        self._pass_on_request()
        self._mind_the_time()
        self._distribute()

    # --- listening

    def _listen(self) -> None:
        workers = self.oversight.workers()
        handles: list[Any] = [w.connection for w in workers] + [w.process.sentinel for w in workers]
        ready = wait(handles, timeout=TICK_SECONDS)
        for worker in workers:
            if self._is_ours(worker) and (worker.connection in ready or worker.process.sentinel in ready):
                gone = not worker.process.is_alive()  # asked before reading, so that its last words are read
                for message in worker.messages():
                    self._hear(worker, message)
                if gone:
                    self._lost(worker)

    def _is_ours(self, worker: Worker) -> bool:
        """False for a rank that was ended meanwhile because another one died."""
        return self.drafters.has(worker) or (self.targets is not None and self.targets.seat_of(worker) is not None)

    def _hear(self, worker: Worker, message: Any) -> None:
        match message:
            case Beat():
                if self.coordinator is not None:
                    self.coordinator.renew(worker.name, time.monotonic())
                elif message.phase == "checking":  # the inline rank that does it
                    self._begin_check()
            case Done() | Failed():
                self._result(worker, message)
            case Loaded(facts):
                self._loaded(worker, facts)
            case Shared():
                self.facts, self._sharing = self._facts_of[worker.name], None
            case RingReady() | Released() | Begun() | Log() | Saved() | Ended():
                self._hear_drafter(worker, message)
            case Checked():
                self._checked = True
                self.hooks.checked(message)
            case Note(text):
                self.hooks.say(text)
            case Recompiled(what):
                self.hooks.say(f"{worker.name} compiled {what}")
                self.hooks.happened("recompiled", f"{worker.name} compiled {what}", worker=worker.name, what=what)

    def _hear_drafter(self, worker: Worker, message: Any) -> None:
        if not self.drafters.has(worker):
            return  # of an earlier generation
        match message:
            case RingReady(handle):
                self.drafters.handles[worker.name] = handle
                self._give_rings()
            case Released(index):
                rank = self.drafters.rank_of(worker)
                if self.coordinator is not None:
                    self.coordinator.release(rank, index)
                self.ledger.trained(index, rank, self._made_by.pop(index, None))
            case Begun(step):
                self._allow(step + 2)
            case Log(values):
                self.hooks.log({**values, "waits": self.oversight.read_waits()})
            case Saved(step, seconds):
                self.drafters.saved(step)
                self.hooks.saved(step, seconds)
            case Ended():
                self.drafters.ended[worker.name] = message

    def _pass_on_request(self) -> None:
        """`draftmill profile`: to one drafter and one target."""
        wanted = self.requests.take() if self._working else None
        if wanted is None:
            return
        seats = [] if self.targets is None else self.targets.working()
        chosen = [*self.drafters.living[:1], *[seat.worker for seat in seats if seat.worker is not None][:1]]
        self.hooks.happened("profile", asked(wanted, [worker.name for worker in chosen]))
        accept(wanted, {worker.name: int(worker.process.pid or 0) for worker in chosen})
        for worker in chosen:
            worker.send(wanted)

    # --- targets

    def _loaded(self, worker: Worker, facts: TargetFacts) -> None:
        self.hooks.target_loaded(facts, worker.name)
        if self.targets is None:
            return
        seat = self.targets.seat_of(worker)
        assert seat is not None
        seat.loaded = True
        self._facts_of[seat.name] = facts
        if self.facts is None and self._sharing is None:
            self._sharing = seat.name
            worker.send(Share())
        self._give_rings([seat])

    def _result(self, worker: Worker, message: Done | Failed) -> None:
        assert self.coordinator is not None
        assert self.targets is not None
        seat = self.targets.seat_of(worker)
        if isinstance(message, Done):
            if self.coordinator.complete(message.lease) and seat is not None:
                seat.restarts = 0
            return
        failures = self.coordinator.fail(message.lease)
        self.hooks.say(f"warning: {worker.name}: {message.reason} (try {failures} of {MAX_FAILURES})")
        if failures >= MAX_FAILURES:
            raise UserError(f"the run stopped: a batch failed {failures} times; {message.reason}")

    def _give_rings(self, seats: list[Seat] | None = None) -> None:
        """Handles of slots in the drafters' device memory, once all ranks have them."""
        handles = self.drafters.all_handles()
        if self.targets is not None and handles:
            for seat in self.targets.working() if seats is None else seats:
                assert seat.worker is not None
                seat.worker.send(Rings(handles))

    def _distribute(self) -> None:
        if self.coordinator is None or self.targets is None:
            return
        if self.drafters.rings_wanted and not self.drafters.all_handles():
            return
        awake = [seat for seat in self.targets.working() if not self._is_silent(seat)]
        for round_ in range(LEASES):  # one for everybody before a second for anybody
            for seat in awake:
                if self.coordinator.outstanding(seat.name) <= round_:
                    self._grant(seat)
        self._supply()

    def _is_silent(self, seat: Seat) -> bool:
        """Its leases have run out: it must not be the one that gets them back."""
        assert seat.worker is not None
        return time.monotonic() - seat.worker.heard >= self.lease_seconds

    def _grant(self, seat: Seat) -> None:
        assert self.coordinator is not None
        assert seat.worker is not None
        if lease := self.coordinator.grant(seat.name, time.monotonic()):
            self._made_by[lease.index] = seat.name
            seat.worker.send(Work(lease.id, lease.index, lease.rank, lease.slot))

    # --- drafters

    def _supply(self) -> None:
        if self.facts is None or self.coordinator is None:
            return
        if self._supplied != self.drafters.generation:
            self._supplied = self.drafters.generation
            self.drafters.tell(Matrices(self.facts))
            self._begin()
        for delivery in self.coordinator.deliver():
            self.drafters.workers[delivery.rank].send(Batch(delivery.index, delivery.slot))

    def _allow(self, steps: int) -> None:
        """Inline ranks: all may begin the steps below `steps`."""
        if self.targets is None and steps > self._may_begin and self._stop_by is None:
            if not self._working:
                self._begin()
            self._may_begin = steps
            self.drafters.tell(MayBegin(steps))

    def _begin(self) -> None:
        self._working = True
        self.hooks.began()

    def _lost(self, worker: Worker) -> None:
        if self.coordinator is not None and self.targets is not None and (seat := self.targets.seat_of(worker)):
            self.coordinator.died(seat.name)
            self._sharing = None if self._sharing == seat.name else self._sharing
            self.targets.lost(seat)
            self._share_again()
        elif self.drafters.has(worker) and not self.drafters.gone(worker):
            self._restart_drafters(f"{worker.name}: {worker.end()}")
        self.oversight.tell()

    def _share_again(self) -> None:
        """The target that was to write embedding and head is gone: another one does it."""
        assert self.targets is not None
        if self.facts is None and self._sharing is None and (ready := self.targets.working()):
            self._sharing = ready[0].name
            assert ready[0].worker is not None
            ready[0].worker.send(Share())

    def _restart_drafters(self, reason: str) -> None:
        """One rank cannot go on without the others: all start anew from the last checkpoint."""
        if self._stop_by is not None:
            raise UserError(f"a drafter ended while the run was stopping ({reason}); the last checkpoint is complete")
        step = self.drafters.restart(reason)
        first = step * self.batches_per_step
        if self.coordinator is not None:
            self.coordinator.rewind(first)
            self._note_saved(first)
        self.ledger.rewound(first, reason)
        if self._working:
            self.hooks.rewound(step)
        self._may_begin, self._working = 0, False
        self.hooks.say(f"warning: the drafter ended ({reason}); it goes on from step {step}")

    def _note_saved(self, first: int) -> None:
        """Batches in the checkpoint, of which the dead drafter had no time to say that it has trained on them."""
        for index in sorted(index for index in self._made_by if index < first):
            self.ledger.trained(index, index % len(self.drafters.jobs), self._made_by.pop(index))

    # --- time

    def _mind_the_time(self) -> None:
        now = time.monotonic()
        if self._working and self._stop_by is None and self.asked_to_stop():
            self._stop_by = now + STOP_SECONDS
            self.drafters.tell(Stop(self._last_step(), check=not self.interrupted()))
            self.hooks.say("stopping: the drafter finishes its step and saves; a second Ctrl-C ends the run at once")
        if self._stop_by is not None and now > self._stop_by and not self.drafters.all_saved:
            raise UserError(
                f"the drafter did not finish its step and save within {STOP_SECONDS:g} s of being asked to stop; the "
                "last checkpoint is complete"
            )
        self._mind_silence(now)

    def _last_step(self) -> int:
        return self._may_begin if self.coordinator is None else self.coordinator.stop()

    def _mind_silence(self, now: float) -> None:
        if self.coordinator is not None:
            for lease in self.coordinator.expire(now):
                self.hooks.say(
                    f"warning: {lease.worker} has been silent for {self.lease_seconds:g} s; batch {lease.index} goes "
                    "to another target"
                )
        for worker, what in self.oversight.turn(now):
            self.hooks.say(f"warning: {worker.name} {what} (last phase: {worker.phase}) and is killed")
            worker.kill()  # its end is noticed like any other

    # --- ends

    def _decode_check(self) -> None:
        """With the target that is still there; the drafters are gone."""
        if not self.check or self.interrupted() or self._checked:
            return
        ready = self.targets.working() if self.targets is not None else []
        if not ready:  # lost, or the inline rank that was to do it ended meanwhile
            self.hooks.checked(None)
            return
        seat = ready[0]
        assert seat.worker is not None
        self._begin_check()
        seat.worker.send(Check(str(self.drafters.checkpoints)))
        while not (self._checked or seat.worker is None or self.interrupted()):
            self._listen()
            self._mind_silence(time.monotonic())
        if not self._checked:
            self.hooks.checked(None)

    def _begin_check(self) -> None:
        if not self._checking:
            self._checking = True
            self.hooks.checking()

    def _end_all(self) -> None:
        for kind in (signal.SIGINT, signal.SIGTERM):  # a second Ctrl-C must not leave a process behind
            signal.signal(kind, signal.SIG_IGN)
        for worker in self.oversight.workers():
            worker.kill()
            worker.close()
        kill_strays()
        self.drafters.clean()
        self.ledger.close()
