"""Slots in host memory that several processes of one host see: a ring of fixed buffers, created once.

The memory is an anonymous file (memfd). It is not bounded by the size of /dev/shm, has no name that could be left
behind, and the kernel frees it when the last process that holds it has ended, however that process ended.

Legend: T token budget, W features per token (taps × hidden size).
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

import torch
from torch import Tensor

from draftmill.errors import UserError
from draftmill.handoff.copies import DeviceReader, DeviceWriter
from draftmill.handoff.interface import ARRIVED, Transfer

PAGE = 4096


class SharedMemory:
    """Zeroed bytes shared with spawned processes: an argument of theirs, mapped again on the other side.

    reserve: claim the pages now, so that a host without room for them fails here and not in the middle of the run.
    """

    def __init__(self, name: str, size: int, *, reserve: bool) -> None:
        self.size = max(PAGE, -(-size // PAGE) * PAGE)
        self._file = os.memfd_create(f"draftmill-{name}")
        os.ftruncate(self._file, self.size)
        if reserve:
            os.posix_fallocate(self._file, 0, self.size)
        self._map()

    def _map(self) -> None:
        self._pinned = False
        weakref.finalize(self, os.close, self._file)  # an open file would keep the bytes, mapped or not
        self.bytes = torch.frombuffer(mmap.mmap(self._file, self.size), dtype=torch.uint8)

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "file": DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.size, self._file = state["size"], state["file"].detach()
        self._map()

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view of the bytes from `offset` on."""
        count = dtype.itemsize
        for size in shape:
            count *= size
        return self.bytes[offset : offset + count].view(dtype).view(shape)

    def pin(self) -> None:
        """Page-lock this process's mapping, so that copies to and from its GPU run beside the arithmetic."""
        if self._pinned:
            return
        address = self.bytes.data_ptr()
        error = torch.cuda.cudart().cudaHostRegister(address, self.size, 0)
        if int(error) != 0:
            raise RuntimeError(f"cannot page-lock {self.size / 1e9:.1f} GB of shared memory (CUDA error {int(error)})")
        self._pinned = True
        # before the memory is unmapped: what is mapped at this address later could not be page-locked
        weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, address).atexit = False


@dataclass(frozen=True, slots=True)
class RingShape:
    """What the slots of all drafter ranks look like."""

    ranks: int
    slots: int
    token_budget: int
    width: int
    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        return self.token_budget * self.width * self.dtype.itemsize

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next: whole pages."""
        return -(-self.slot_bytes // PAGE) * PAGE

    @property
    def total_bytes(self) -> int:
        return self.ranks * self.slots * self.stride


class SharedRing:
    """The slots of all ranks in one piece of shared memory."""

    def __init__(self, shape: RingShape) -> None:
        self.shape = shape
        self.memory = SharedMemory("hidden-states", shape.total_bytes, reserve=True)

    def slot(self, rank: int, slot: int) -> Tensor:
        """features [T, W] of one slot."""
        shape = self.shape
        assert rank < shape.ranks, f"no rank {rank}"
        assert slot < shape.slots, f"no slot {slot}"
        offset = (rank * shape.slots + slot) * shape.stride
        return self.memory.tensor(offset, (shape.token_budget, shape.width), shape.dtype)

    def rank_slots(self, rank: int) -> list[Tensor]:
        return [self.slot(rank, slot) for slot in range(self.shape.slots)]


class HostWriter:
    """A target on the CPU writes into the slot itself."""

    def __init__(self, slots: list[Tensor]) -> None:
        self._slots = slots

    def begin(self, slot: int) -> Tensor:
        return self._slots[slot]

    def end(self, slot: int) -> Transfer:
        return ARRIVED


class HostReader:
    """A drafter on the CPU reads the slot itself."""

    def __init__(self, slots: list[Tensor]) -> None:
        self._slots = slots
        self.slots = len(slots)
        self.slot_bytes = slots[0].numel() * slots[0].element_size()

    def fetch(self, slot: int) -> None:
        pass

    def features(self, slot: int) -> Tensor:
        return self._slots[slot]

    def done(self, slot: int) -> Transfer:
        return ARRIVED


def shared_writers(ring: SharedRing, device: str) -> list[HostWriter | DeviceWriter]:
    """One writer a rank, for a target on `device`."""
    pools = [ring.rank_slots(rank) for rank in range(ring.shape.ranks)]
    if not device.startswith("cuda"):
        return [HostWriter(pool) for pool in pools]
    ring.memory.pin()
    staging = DeviceWriter.make_staging(pools[0][0], device)
    return [DeviceWriter(pool, staging) for pool in pools]


def shared_reader(ring: SharedRing, rank: int, device: str) -> HostReader | DeviceReader:
    """The reader of rank `rank`, for a drafter on `device`."""
    if not device.startswith("cuda"):
        return HostReader(ring.rank_slots(rank))
    ring.memory.pin()
    return DeviceReader(ring.rank_slots(rank), device)


def check_room(shape: RingShape, available: int, *, kept_free: int = 1 << 30) -> None:
    """Refuse slots that do not fit into `available` bytes of host memory, less what the processes need themselves."""
    what = f"{shape.slots} slots × {shape.ranks} drafter ranks × {shape.slot_bytes / 1e9:.2f} GB"
    refuse_too_many(shape, shape.ranks, available, kept_free, what, "host memory", "lower data.token_budget")


def refuse_too_many(
    shape: RingShape, ranks: int, available: int, kept_free: int, what: str, memory: str, remedy: str
) -> None:
    """UserError with the number of slots that would fit `available` bytes less `kept_free`."""
    room = max(0, available - kept_free)
    total = ranks * shape.slots * shape.stride
    if total <= room:
        return
    fit = room // (ranks * shape.stride)
    raise UserError(
        f"handoff.slots: {what} are {total / 1e9:.1f} GB of {memory}, but {available / 1e9:.1f} GB are free and "
        f"{kept_free / 1e9:.1f} GB of that stay for the processes; "
        + (f"{fit} would fit: set handoff.slots={fit}" if fit else f"not even one fits: {remedy}")
    )
