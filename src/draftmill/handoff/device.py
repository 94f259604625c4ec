"""Slots in the consuming GPU's own memory, written by the targets' GPUs directly: no way over the host.

The drafter's process allocates them and gives out a handle; a target maps them into its own process and copies peer to
peer. Only for devices that can reach each other (`reachable`).

Legend: T token budget, W features per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftmill.handoff.copies import DeviceWriter, EventTransfer
from draftmill.handoff.device_memory import Opened, allocate, reaches
from draftmill.handoff.shared import RingShape, refuse_too_many

KEPT_FREE = 1 << 30  # at least: the drafter's weights are there already, its activations are not


class DeviceRing:
    """The slots of one rank on its own GPU, and the drafter's reader of them. handle: opens them elsewhere."""

    def __init__(self, shape: RingShape, device: str) -> None:
        self.slots, self.slot_bytes = shape.slots, shape.slot_bytes
        check_device_room(shape, device, torch.cuda.mem_get_info(device)[0])
        memory, self.handle = allocate(shape.slots * shape.stride, device)
        self._slots = slot_views(memory, shape)

    def fetch(self, slot: int) -> None:
        pass

    def features(self, slot: int) -> Tensor:
        return self._slots[slot]

    def done(self, slot: int) -> EventTransfer:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._slots[slot].device))
        return EventTransfer(event)


def check_device_room(shape: RingShape, device: str, available: int) -> None:
    """Refuse one rank's slots that do not fit into `available` bytes of its GPU."""
    what = f"{shape.slots} slots × {shape.slot_bytes / 1e9:.2f} GB"
    remedy = "lower data.token_budget, or set handoff.queue=host"
    refuse_too_many(shape, 1, available, KEPT_FREE, what, f"the memory of {device}", remedy)


def slot_views(memory: Tensor, shape: RingShape) -> list[Tensor]:
    """features [T, W] of each slot in the uint8 memory of one rank."""
    starts = (slot * shape.stride for slot in range(shape.slots))
    size = (shape.token_budget, shape.width)
    return [memory[start : start + shape.slot_bytes].view(shape.dtype).view(size) for start in starts]


class DeviceRingWriters:
    """One writer a rank, for a target on `device`."""

    def __init__(self, handles: tuple[bytes, ...], shape: RingShape, device: str) -> None:
        self._opened = [Opened(handle, shape.slots * shape.stride, device) for handle in handles]
        pools = [slot_views(opened.bytes, shape) for opened in self._opened]
        staging = DeviceWriter.make_staging(pools[0][0], device)
        self.writers = [DeviceWriter(pool, staging) for pool in pools]

    def close(self) -> None:
        """The ranks are gone: give their memory back."""
        for opened in self._opened:
            opened.close()


def reachable(targets: tuple[str, ...], drafters: tuple[str, ...]) -> bool:
    """Whether every target's GPU can write into every drafter's."""
    if not all(device.startswith("cuda") for device in (*targets, *drafters)):
        return False
    pairs = [(torch.device(one).index or 0, torch.device(two).index or 0) for one in targets for two in drafters]
    return all(one == two or reaches(one, two) for one, two in pairs)
