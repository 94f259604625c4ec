"""Copies between a GPU and slots elsewhere, on a stream of their own, beside the arithmetic.

Two staging buffers on the device are enough on either side: one that is worked on, one that is on its way.

Legend: T token budget, W features per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

BUFFERS = 2


class EventTransfer:
    """Over when the device has reached the event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def ready(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


@dataclass
class Staging:
    """Device buffers [T, W] that a target's taps write into, one after another, and the stream that empties them."""

    buffers: list[Tensor]
    stream: torch.cuda.Stream
    emptied: list[torch.cuda.Event]
    turn: int = 0
    of_slot: dict[tuple[int, int], int] = field(default_factory=dict)  # (pool, slot) → buffer


class DeviceWriter:
    """A target on a GPU: the taps write a staging buffer; a copy stream brings it into the slot, which may lie in
    pinned host memory or on another GPU. All pools of a target share its staging buffers."""

    def __init__(self, slots: list[Tensor], staging: Staging) -> None:
        self._slots, self._staging = slots, staging

    @staticmethod
    def make_staging(like: Tensor, device: str) -> Staging:
        buffers = [torch.empty(like.shape, dtype=like.dtype, device=device) for _ in range(BUFFERS)]
        with torch.cuda.device(device):
            return Staging(buffers, torch.cuda.Stream(), [torch.cuda.Event() for _ in buffers])

    def begin(self, slot: int) -> Tensor:
        staging = self._staging
        turn = staging.turn
        staging.turn = (turn + 1) % BUFFERS
        staging.of_slot[id(self), slot] = turn
        buffer = staging.buffers[turn]
        torch.cuda.current_stream(buffer.device).wait_event(staging.emptied[turn])  # an unrecorded event is no wait
        return buffer

    def end(self, slot: int) -> EventTransfer:
        staging = self._staging
        turn = staging.of_slot.pop((id(self), slot))
        buffer = staging.buffers[turn]
        staging.stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(staging.stream):
            self._slots[slot].copy_(buffer, non_blocking=True)
            staging.emptied[turn].record()
            arrived = torch.cuda.Event()
            arrived.record()
        return EventTransfer(arrived)


class DeviceReader:
    """A drafter on a GPU whose slots lie in pinned host memory: each is copied to one of two buffers in time."""

    def __init__(self, slots: list[Tensor], device: str) -> None:
        self._slots = slots
        self.slots = len(slots)
        self.slot_bytes = slots[0].numel() * slots[0].element_size()
        self._buffers = [torch.empty(slots[0].shape, dtype=slots[0].dtype, device=device) for _ in range(BUFFERS)]
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._filled = [torch.cuda.Event() for _ in range(BUFFERS)]
            self._read = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._of_slot: dict[int, int] = {}
        self._waiting: list[int] = []  # asked for while both buffers were taken

    def fetch(self, slot: int) -> None:
        self._waiting.append(slot)
        self._fill()

    def features(self, slot: int) -> Tensor:
        turn = self._of_slot[slot]
        buffer = self._buffers[turn]
        torch.cuda.current_stream(buffer.device).wait_event(self._filled[turn])
        return buffer

    def done(self, slot: int) -> EventTransfer:
        turn = self._of_slot.pop(slot)
        self._read[turn].record(torch.cuda.current_stream(self._buffers[turn].device))
        filled, self._filled[turn] = self._filled[turn], torch.cuda.Event()
        self._fill()
        return EventTransfer(filled)  # the slot is free once it has been copied; the arithmetic reads the buffer

    def _fill(self) -> None:
        while self._waiting and len(self._of_slot) < BUFFERS:
            slot = self._waiting.pop(0)
            turn = next(t for t in range(BUFFERS) if t not in self._of_slot.values())
            self._of_slot[slot] = turn
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._read[turn])
                self._buffers[turn].copy_(self._slots[slot], non_blocking=True)
                self._filled[turn].record()
