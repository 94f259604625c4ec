"""Memory that several processes share: what one writes another reads, within bounds, and nothing stays behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmill.errors import UserError
from draftmill.handoff.device import KEPT_FREE, check_device_room
from draftmill.handoff.matrices import SharedMatrices, is_tied
from draftmill.handoff.memory import MemoryRing
from draftmill.handoff.shared import (
    PAGE,
    RingShape,
    SharedMemory,
    SharedRing,
    check_room,
    shared_reader,
    shared_writers,
)

SHAPE = RingShape(ranks=2, slots=3, token_budget=5, width=7, dtype=torch.bfloat16)
spawned = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def other_process(body: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess]:
    process = spawned.Process(target=body, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def run_elsewhere(body: Callable[..., None], *arguments: Any) -> None:
    with other_process(body, *arguments) as process:
        process.join(60)
        assert process.exitcode == 0


def states(rank: int, slot: int) -> torch.Tensor:
    """Other values in every slot."""
    return torch.arange(35).view(5, 7).to(torch.bfloat16) + 50 * (3 * rank + slot)


# --- bodies of other processes


def write_text(memory: SharedMemory, text: bytes) -> None:
    memory.bytes[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


def write_slots(ring: SharedRing) -> None:
    for rank, writer in enumerate(shared_writers(ring, "cpu")):
        for slot in range(ring.shape.slots):
            writer.begin(slot).copy_(states(rank, slot))
            assert writer.end(slot).ready()


def write_matrices(matrices: SharedMatrices, embedding: torch.Tensor, head: torch.Tensor | None) -> None:
    matrices.write(embedding, embedding if head is None else head)


def hold(memory: SharedMemory) -> None:
    memory.bytes.fill_(1)
    os.write(memory._file, b"held")
    signal.pause()


# --- shared memory


def test_bytes_written_in_a_spawned_process_are_seen_here_and_the_other_way() -> None:
    memory = SharedMemory("test", 10, reserve=True)
    assert memory.size == PAGE
    assert not memory.bytes.any()
    run_elsewhere(write_text, memory, b"one")
    assert bytes(memory.bytes[:3].tolist()) == b"one"
    memory.bytes[3] = ord("!")
    run_elsewhere(write_text, memory, b"two")
    assert bytes(memory.bytes[:4].tolist()) == b"two!"


def test_tensors_are_views_at_their_place() -> None:
    memory = SharedMemory("test", 64, reserve=False)
    memory.tensor(16, (2, 3), torch.float32).copy_(torch.arange(6.0).view(2, 3))
    assert memory.bytes[:40].view(torch.float32).tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5]


def mapped(name: str) -> list[str]:
    """Mappings of this process with this name."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"memfd:draftmill-{name} " in line]


def test_the_memory_has_no_name_and_ends_with_its_last_process() -> None:
    before = set(Path("/dev/shm").iterdir())
    memory = SharedMemory("gone", 1 << 20, reserve=True)
    assert len(mapped("gone")) == 1
    with other_process(hold, memory) as process:
        while os.pread(memory._file, 4, 0) != b"held":  # pytest-timeout ends it
            assert process.is_alive()
    assert set(Path("/dev/shm").iterdir()) <= before
    file = memory._file
    del memory
    assert not mapped("gone")
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file)


# --- ring


def test_slots_of_all_ranks_are_apart_and_reach_the_reader() -> None:
    ring = SharedRing(SHAPE)
    run_elsewhere(write_slots, ring)
    for rank in range(SHAPE.ranks):
        reader = shared_reader(ring, rank, "cpu")
        assert (reader.slots, reader.slot_bytes) == (3, 70)
        for slot in range(SHAPE.slots):
            reader.fetch(slot)
            assert torch.equal(reader.features(slot), states(rank, slot))
            assert reader.done(slot).ready()


def test_slots_begin_at_whole_pages_within_the_memory() -> None:
    big = RingShape(ranks=2, slots=2, token_budget=3, width=1000, dtype=torch.float32)
    assert (big.slot_bytes, big.stride, big.total_bytes) == (12_000, 3 * PAGE, 12 * PAGE)
    ring = SharedRing(big)
    starts = [slot.data_ptr() - ring.memory.bytes.data_ptr() for rank in (0, 1) for slot in ring.rank_slots(rank)]
    assert starts == [0, 3 * PAGE, 6 * PAGE, 9 * PAGE]
    with pytest.raises(AssertionError, match="no slot 2"):
        ring.slot(0, 2)
    with pytest.raises(AssertionError, match="no rank 2"):
        ring.slot(2, 0)


def test_room_is_checked_before_memory_is_taken() -> None:
    shape = RingShape(ranks=2, slots=10, token_budget=1024, width=1024, dtype=torch.bfloat16)  # 2 MiB a slot
    check_room(shape, 40 << 20, kept_free=0)
    with pytest.raises(UserError, match=r"10 slots × 2 drafter ranks .* 9 would fit: set handoff\.slots=9$"):
        check_room(shape, (40 << 20) - 1, kept_free=0)
    with pytest.raises(UserError, match=r"set handoff\.slots=5$"):
        check_room(shape, 21 << 20, kept_free=1 << 20)
    for available in (1 << 20, 0):
        with pytest.raises(UserError, match=r"not even one fits: lower data\.token_budget$"):
            check_room(shape, available, kept_free=1 << 20)


def test_room_on_a_device_is_checked_before_memory_is_taken() -> None:
    shape = RingShape(2, 4, 1024, 512, torch.bfloat16)  # 1 MB a slot, 4 MB a rank
    check_device_room(shape, "cuda:1", (4 << 20) + KEPT_FREE)
    with pytest.raises(UserError, match=r"the memory of cuda:1.* 3 would fit: set handoff.slots=3"):
        check_device_room(shape, "cuda:1", (4 << 20) - 1 + KEPT_FREE)
    with pytest.raises(UserError, match=r"not even one fits: .*handoff.queue=host"):
        check_device_room(shape, "cuda:1", KEPT_FREE)


def test_a_ring_in_one_process_hands_over_what_was_written() -> None:
    ring = MemoryRing(2, 5, 7, dtype=torch.bfloat16, device="cpu")
    assert (ring.slots, ring.slot_bytes) == (2, 70)
    for slot in range(2):
        ring.begin(slot).copy_(states(0, slot))
        assert ring.end(slot).ready()
    for slot in range(2):
        ring.fetch(slot)
        assert torch.equal(ring.features(slot), states(0, slot))
        assert ring.done(slot).ready()
    assert ring.begin(0).data_ptr() == ring.features(0).data_ptr()  # nothing moves


# --- embedding and head


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_arrive_bit_for_bit(tied: bool) -> None:
    bits = torch.randint(-(2**15), 2**15, (2, 11, 6), dtype=torch.int16)  # all patterns, NaNs too
    embedding, head = bits.view(torch.bfloat16)
    matrices = SharedMatrices(11, 6, torch.bfloat16)
    run_elsewhere(write_matrices, matrices, embedding, None if tied else head)
    read = matrices.read(tied=tied, device="cpu")
    assert is_tied(*read) == tied
    assert torch.equal(read[0].view(torch.int16), bits[0])
    assert torch.equal(read[1].view(torch.int16), bits[0 if tied else 1])


def test_matrices_of_another_size_are_refused() -> None:
    with pytest.raises(AssertionError, match="not the sizes"):
        SharedMatrices(4, 2, torch.float32).write(torch.zeros(5, 2), torch.zeros(5, 2))
