"""Where the training loop's batches come from: a target in the same process, or slots that other processes fill."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from draftmill.data.plan import BatchPlan
from draftmill.handoff.interface import Reader, Transfer
from draftmill.handoff.memory import MemoryRing
from draftmill.records import HiddenBatch
from draftmill.run.link import Link
from draftmill.run.messages import Batch, Begun, MayBegin, Profile, Released, Stop
from draftmill.run.profiling import Profiler
from draftmill.run.states import States
from draftmill.train.parallel import Doing, nobody


class InlineSource:
    """Computes a batch's states when the drafter asks for it. may_take: False when the run is to end before a batch."""

    def __init__(
        self,
        plan: BatchPlan,
        states: States,
        ring: MemoryRing,
        *,
        may_take: Callable[[int], bool],
        on_release: Callable[[int], None],
        doing: Doing = nobody,
    ) -> None:
        self._plan, self._states, self._ring = plan, states, ring
        self._may_take, self._on_release, self._doing = may_take, on_release, doing

    def take(self, index: int) -> HiddenBatch | None:
        if not self._may_take(index):
            return None
        self._doing("forward", f"batch {index}")
        batch, features = self._plan.batch(index), self._ring.begin(0)
        self._states.get(batch, features)
        return HiddenBatch(batch, features, self._states.fingerprint, self._states.taps)

    def release(self, index: int) -> None:
        self._on_release(index)


class StepGate:
    """Lets an inline rank begin a step only when the supervisor has allowed it to all ranks: so all end at the same."""

    def __init__(self, link: Link, batches_per_step: int, profiler: Profiler) -> None:
        self._link, self._batches_per_step, self._profiler = link, batches_per_step, profiler
        self._allowed, self._begun = 0, -1
        self.stop: Stop | None = None

    def __call__(self, index: int) -> bool:
        step = index // self._batches_per_step
        self._profiler.at(step)
        if step > self._begun:
            self._begun = step
            self._link.send(Begun(step))
        while self._link.pending() or (step >= self._allowed and self.stop is None):
            if not self._link.pending():
                self._link.activity.enter("waiting for a batch", f"leave to begin step {step}")
            message = self._link.receive()
            if isinstance(message, MayBegin):
                self._allowed = max(self._allowed, message.steps)
            elif isinstance(message, Stop):
                self.stop = message
            elif isinstance(message, Profile):
                self._profiler.request(message)
        return step < self._allowed


class QueuedSource:
    """Batches that the supervisor announces, in index order, each in a slot of this rank.

    whole_rounds: the ranks meet in every micro-step. Then a stop lets each rank do all that was announced, which is the
    same number of rounds for all, although the updates of an unfinished step are thrown away.
    """

    def __init__(
        self,
        link: Link,
        plan: BatchPlan,
        reader: Reader,
        *,
        batches_per_step: int,
        whole_rounds: bool,
        fingerprint: str,
        taps: tuple[int, ...],
        profiler: Profiler,
    ) -> None:
        self._link, self._plan, self._reader, self._profiler = link, plan, reader, profiler
        self._batches_per_step, self._fingerprint, self._taps = batches_per_step, fingerprint, taps
        self._whole_rounds = whole_rounds
        self._announced: dict[int, int] = {}  # index → slot
        self._using: deque[tuple[int, Transfer]] = deque()  # released by the loop, still read by the device
        self._end: int | None = None  # first batch that is not to be trained any more

    def take(self, index: int) -> HiddenBatch | None:
        self._profiler.at(index // self._batches_per_step)
        while index not in self._announced and not self._ended(index):
            if not self._link.pending():
                self._give_back(all_of_them=True)
                self._link.activity.enter("waiting for a batch", f"batch {index}")
            self._hear(self._link.receive())
        while self._link.pending():
            self._hear(self._link.receive())
        self._give_back(all_of_them=False)
        if index not in self._announced or (self._ended(index) and not self._whole_rounds):
            return None
        features = self._reader.features(self._announced[index])
        return HiddenBatch(self._plan.batch(index), features, self._fingerprint, self._taps)

    def _ended(self, index: int) -> bool:
        return self._end is not None and index >= self._end

    def release(self, index: int) -> None:
        self._using.append((index, self._reader.done(self._announced.pop(index))))
        self._give_back(all_of_them=False)

    def flush(self) -> None:
        """Give back what is still held. At the end of the run."""
        self._give_back(all_of_them=True)

    def _hear(self, message: object) -> None:
        if isinstance(message, Batch):
            self._announced[message.index] = message.slot
            self._reader.fetch(message.slot)
        elif isinstance(message, Stop):
            self._end = message.steps * self._batches_per_step
        elif isinstance(message, Profile):
            self._profiler.request(message)

    def _give_back(self, *, all_of_them: bool) -> None:
        while self._using:
            index, transfer = self._using[0]
            if not (all_of_them or transfer.ready()):
                return
            if all_of_them:  # the device may still be at it
                self._link.activity.enter("micro-step", f"batch {index}")
            transfer.wait()
            self._using.popleft()
            self._link.send(Released(index))
