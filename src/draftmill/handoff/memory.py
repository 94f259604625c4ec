"""Slots within one process: for inline runs and tests."""

from __future__ import annotations

import torch
from torch import Tensor

from draftmill.handoff.interface import ARRIVED, Transfer


class MemoryRing:
    """`slots` buffers of features [T, W], allocated once. Writer and reader at the same time: nothing moves."""

    def __init__(self, slots: int, token_budget: int, width: int, *, dtype: torch.dtype, device: str) -> None:
        self.slots = slots
        self._buffers = torch.zeros(slots, token_budget, width, dtype=dtype, device=device)
        self.slot_bytes = self._buffers[0].numel() * self._buffers.element_size()

    def begin(self, slot: int) -> Tensor:
        return self._buffers[slot]

    def end(self, slot: int) -> Transfer:
        return ARRIVED

    def fetch(self, slot: int) -> None:
        pass

    def features(self, slot: int) -> Tensor:
        return self._buffers[slot]

    def done(self, slot: int) -> Transfer:
        return ARRIVED
