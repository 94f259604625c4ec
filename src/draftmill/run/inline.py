"""One device for both roles: target and drafter take turns in one process, over the same hand-off as separate ones."""

from __future__ import annotations

from draftmill.data.plan import BatchPlan
from draftmill.handoff.interface import Handoff
from draftmill.records import HiddenBatch
from draftmill.target.capture import Target
from draftmill.target.reuse import ReusedStates


class InlineSource:
    """Computes a batch's states when the drafter asks for it."""

    def __init__(self, plan: BatchPlan, target: Target, handoff: Handoff, reuse: ReusedStates) -> None:
        self._plan, self._target, self._handoff, self._reuse = plan, target, handoff, reuse

    def take(self, index: int) -> HiddenBatch:
        slot = self._handoff.reserve(index)
        assert slot is not None, "an inline run releases each batch before it takes the next"
        batch, features = self._plan.batch(index), self._handoff.buffer(slot)
        if not self._reuse.load(batch.bin, features):
            self._target.capture(batch, features)
            self._reuse.keep(batch.bin, features[: batch.tokens])
        self._handoff.publish(slot, batch)
        taken = self._handoff.take(index)
        assert taken is not None
        return taken

    def release(self, index: int) -> None:
        self._handoff.release(index)
