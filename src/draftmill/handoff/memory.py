"""A hand-off within one process: for inline runs and tests."""

from __future__ import annotations

import torch
from torch import Tensor

from draftmill.records import HiddenBatch, TokenBatch


class MemoryHandoff:
    """`slots` buffers of [token_budget, width], allocated once."""

    def __init__(
        self,
        slots: int,
        token_budget: int,
        width: int,
        *,
        dtype: torch.dtype,
        device: str,
        target_fingerprint: str,
        taps: tuple[int, ...],
    ) -> None:
        self.slots = slots
        self._buffers = [torch.zeros(token_budget, width, dtype=dtype, device=device) for _ in range(slots)]
        self.slot_bytes = self._buffers[0].numel() * self._buffers[0].element_size()
        self._fingerprint, self._taps = target_fingerprint, taps
        self._free = list(range(slots))
        self._slot_of: dict[int, int] = {}
        self._index_of: dict[int, int] = {}
        self._published: dict[int, HiddenBatch] = {}

    def reserve(self, index: int) -> int | None:
        assert index not in self._slot_of, f"batch {index} has a slot already"
        if not self._free:
            return None
        slot = self._free.pop(0)
        self._slot_of[index], self._index_of[slot] = slot, index
        return slot

    def buffer(self, slot: int) -> Tensor:
        assert slot in self._index_of, f"slot {slot} is not reserved"
        return self._buffers[slot]

    def publish(self, slot: int, batch: TokenBatch) -> None:
        assert self._index_of.get(slot) == batch.index, f"slot {slot} is not reserved for batch {batch.index}"
        self._published[batch.index] = HiddenBatch(batch, self._buffers[slot], self._fingerprint, self._taps)

    def take(self, index: int) -> HiddenBatch | None:
        return self._published.get(index)

    def release(self, index: int) -> None:
        assert index in self._published, f"batch {index} was never published"
        del self._published[index]
        slot = self._slot_of.pop(index)
        del self._index_of[slot]
        self._free.append(slot)
