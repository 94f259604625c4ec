"""Slots in the consuming GPU's own memory, written by the targets' GPUs directly: no way over the host.

The drafter's process allocates them and gives out CUDA IPC handles; a target maps them into its own process and copies
peer to peer. Only for devices that can reach each other (`reachable`).

Legend: T token budget, W features per token.
"""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor

from draftmill.handoff.copies import DeviceWriter, EventTransfer
from draftmill.handoff.shared import RingShape


class DeviceRing:
    """The slots of one rank on its own GPU, and the drafter's reader of them."""

    def __init__(self, shape: RingShape, device: str) -> None:
        self.slots, self.slot_bytes = shape.slots, shape.slot_bytes
        size = (shape.slots, shape.token_budget, shape.width)
        self._slots = torch.zeros(size, dtype=shape.dtype, device=device)
        torch.cuda.synchronize(device)

    def handle(self) -> bytes:
        """What another process needs to map the slots. Valid while this process lives and keeps them."""
        import torch.multiprocessing  # noqa: F401  teaches the pickler about CUDA memory

        return bytes(ForkingPickler.dumps(self._slots))

    def fetch(self, slot: int) -> None:
        pass

    def features(self, slot: int) -> Tensor:
        return self._slots[slot]

    def done(self, slot: int) -> EventTransfer:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._slots.device))
        return EventTransfer(event)


def device_writers(handles: list[bytes], device: str) -> list[DeviceWriter]:
    """One writer a rank, for a target on `device`."""
    pools = [list(pickle.loads(handle)) for handle in handles]
    staging = DeviceWriter.make_staging(pools[0][0], device)
    return [DeviceWriter(pool, staging) for pool in pools]


def reachable(targets: tuple[str, ...], drafters: tuple[str, ...]) -> bool:
    """Whether every target's GPU can write into every drafter's."""
    if not all(device.startswith("cuda") for device in (*targets, *drafters)):
        return False
    pairs = [(torch.device(one).index or 0, torch.device(two).index or 0) for one in targets for two in drafters]
    return all(one == two or torch.cuda.can_device_access_peer(one, two) for one, two in pairs)
