"""What a hand-off is, whatever carries it.

A batch index gets a slot *before* its states are computed, so the oldest missing batch always has a place to land, and
memory is bounded by `slots × slot_bytes`. Back-pressure is the absence of a free slot: nothing is evicted or dropped.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftmill.records import HiddenBatch, TokenBatch


class Handoff(Protocol):
    """Slots for hidden states, written by a target and read by a drafter in index order."""

    slots: int
    slot_bytes: int

    def reserve(self, index: int) -> int | None:
        """A free slot for batch `index`, or None while there is none. Reserving an index twice is a bug."""

    def buffer(self, slot: int) -> Tensor:
        """features [T, K·H] of a reserved slot, to be written in place."""

    def publish(self, slot: int, batch: TokenBatch) -> None:
        """The slot's features are complete and belong to `batch`."""

    def take(self, index: int) -> HiddenBatch | None:
        """Batch `index` if it has been published. Its tensors stay valid until `release`."""

    def release(self, index: int) -> None:
        """The drafter is done with batch `index`: its slot is free again."""


class BatchSource(Protocol):
    """What the training loop sees of it all: batches by index."""

    def take(self, index: int) -> HiddenBatch:
        """Batch `index` of the plan, once its states are there."""

    def release(self, index: int) -> None:
        """Done with it."""
