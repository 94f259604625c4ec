"""What a hand-off is, whatever carries it: slots that a target writes and a drafter reads.

Which batch is in which slot, and when a slot is free again, is the coordinator's business: a slot is reserved before
the target runs, so the oldest missing batch always has a place to land, and memory is bounded by `slots × slot_bytes`.
Nothing here is allocated per batch.

Legend: T token budget, W features per token (taps × hidden size).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftmill.records import HiddenBatch


class Transfer(Protocol):
    """Bytes on their way, or work on the device that still uses them."""

    def ready(self) -> bool:
        """Whether it is over. Never blocks."""

    def wait(self) -> None:
        """Return when it is over."""


class _Arrived:
    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass


ARRIVED = _Arrived()


class Writer(Protocol):
    """The target's side of one drafter rank's slots."""

    def begin(self, slot: int) -> Tensor:
        """features [T, W] on the target's device, to be written in place by the taps."""

    def end(self, slot: int) -> Transfer:
        """They are written (or will be, by work given to the device): bring them into the slot."""


class Reader(Protocol):
    """The drafter's side of its slots."""

    slots: int
    slot_bytes: int

    def fetch(self, slot: int) -> None:
        """The slot will be wanted: begin to bring it to the drafter's device. Call in the order of use."""

    def features(self, slot: int) -> Tensor:
        """features [T, W] on the drafter's device, valid until `done`."""

    def done(self, slot: int) -> Transfer:
        """No more work on these features will be given to the device. The slot is free once the transfer is over."""


class BatchSource(Protocol):
    """What the training loop sees of it all: batches by index."""

    def take(self, index: int) -> HiddenBatch | None:
        """Batch `index` of the plan, once its states are there. None: the run is to end before this batch. With several
        ranks all are told so in the same optimizer step, before any of them can wait for another."""

    def release(self, index: int) -> None:
        """Done with it."""
