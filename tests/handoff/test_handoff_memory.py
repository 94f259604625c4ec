"""The contract of a hand-off, on the one within a process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.handoff.memory import MemoryHandoff
from draftmill.records import TokenBatch

TOKENS, WIDTH = 4, 3


def make(slots: int = 2, dtype: torch.dtype = torch.bfloat16) -> MemoryHandoff:
    return MemoryHandoff(
        slots, TOKENS, WIDTH, dtype=dtype, device="cpu", target_fingerprint="cafe", taps=(1, 5, 9)
    )  # fmt: skip


def tokens(index: int) -> TokenBatch:
    whole = torch.full((TOKENS,), index, dtype=torch.int32)
    zeros = torch.zeros(TOKENS, dtype=torch.int32)
    return TokenBatch(whole, zeros.bool(), zeros, zeros, (index,), index=index, bin=index, epoch=0)


def fill(handoff: MemoryHandoff, index: int, slot: int) -> None:
    handoff.buffer(slot).fill_(index + 1)
    handoff.publish(slot, tokens(index))


def test_a_batch_goes_through_with_its_own_features_and_provenance() -> None:
    handoff = make()
    slot = handoff.reserve(7)
    assert slot is not None
    buffer = handoff.buffer(slot)
    assert (buffer.shape, buffer.dtype) == ((TOKENS, WIDTH), torch.bfloat16)
    assert handoff.slot_bytes == TOKENS * WIDTH * 2
    assert handoff.take(7) is None, "nothing to take before it is published"
    wanted = torch.randn(TOKENS, WIDTH).bfloat16()
    buffer.copy_(wanted)
    batch = tokens(7)
    handoff.publish(slot, batch)
    taken = handoff.take(7)
    assert taken is not None
    assert torch.equal(taken.features, wanted)
    assert taken.features.data_ptr() == buffer.data_ptr(), "handed over, not copied"
    assert taken.tokens is batch
    assert (taken.target_fingerprint, taken.taps, taken.final_hidden) == ("cafe", (1, 5, 9), None)
    handoff.release(7)
    assert handoff.take(7) is None


def test_no_slot_while_all_are_in_use_and_one_again_after_release() -> None:
    handoff = make(slots=2)
    slots = [handoff.reserve(index) for index in (0, 1)]
    assert sorted(slots) == [0, 1]
    assert handoff.reserve(2) is None
    fill(handoff, 0, slots[0])
    assert handoff.take(0) is not None
    assert handoff.reserve(2) is None, "a batch in the drafter's hands keeps its slot"
    handoff.release(0)
    assert handoff.reserve(2) == slots[0]
    assert handoff.take(2) is None, "the batch before it in this slot must not show"


def test_buffers_of_different_slots_do_not_share_memory() -> None:
    handoff = make(slots=3)
    for index in range(3):
        fill(handoff, index, handoff.reserve(index))
    for index in range(3):
        assert (handoff.take(index).features == index + 1).all()


def test_misuse_is_a_bug_and_is_caught() -> None:
    handoff = make()
    slot = handoff.reserve(0)
    with pytest.raises(AssertionError, match="batch 0 has a slot already"):
        handoff.reserve(0)
    with pytest.raises(AssertionError, match="not reserved"):
        handoff.buffer(1 - slot)
    with pytest.raises(AssertionError, match="not reserved for batch 1"):
        handoff.publish(slot, tokens(1))
    with pytest.raises(AssertionError, match="not reserved"):
        handoff.publish(1 - slot, tokens(0))
    with pytest.raises((AssertionError, KeyError)):
        handoff.release(0)  # never published
    with pytest.raises((AssertionError, KeyError)):
        handoff.release(5)  # never reserved
    fill(handoff, 0, slot)
    with pytest.raises(AssertionError, match="batch 0 has a slot already"):
        handoff.reserve(0)
    handoff.release(0)
    with pytest.raises((AssertionError, KeyError)):
        handoff.release(0)
    with pytest.raises(AssertionError, match="not reserved"):
        handoff.publish(slot, tokens(0))
    assert {handoff.reserve(1), handoff.reserve(2)} == {0, 1}, "misuse must not lose or double a slot"


@settings(max_examples=200, deadline=None)
@given(data=st.data(), slots=st.integers(1, 4), total=st.integers(1, 10))
def test_any_interleaving_hands_over_each_batch_once_within_the_slots(
    data: st.DataObject, slots: int, total: int
) -> None:
    """A producer that reserves in index order and publishes in any order, and a consumer that takes in index order."""
    handoff = make(slots, torch.float32)
    reserved: dict[int, int] = {}  # index → slot, not yet published
    published: set[int] = set()
    next_reserve, next_take, held, taken = 0, 0, None, []
    while next_take < total or held is not None:
        # moves that get on come first, so that the simplest example is a short one
        able = {"publish": reserved, "release": held is not None, "take": held is None, "reserve": next_reserve < total}
        moves = sorted((move for move in able if able[move]), key=lambda m: m == "take" and next_take not in published)
        move = data.draw(st.sampled_from(moves))
        in_flight = len(reserved) + len(published) + (held is not None)
        assert in_flight <= slots
        if move == "reserve":
            slot = handoff.reserve(next_reserve)
            assert (slot is None) == (in_flight == slots)
            if slot is not None:
                assert slot not in reserved.values()
                reserved[next_reserve] = slot
                next_reserve += 1
        elif move == "publish":
            index = data.draw(st.sampled_from(sorted(reserved)))
            fill(handoff, index, reserved.pop(index))
            published.add(index)
        elif move == "take":
            batch = handoff.take(next_take)
            assert (batch is not None) == (next_take in published)
            if batch is not None:
                published.remove(next_take)
                held, next_take = batch, next_take + 1
        else:
            index = held.tokens.index
            assert (held.features == index + 1).all(), "the features changed while the drafter held them"
            assert (held.tokens.input_ids == index).all()
            taken.append(index)
            handoff.release(index)
            held = None
    assert taken == list(range(total))
    assert sorted(handoff.reserve(total + i) for i in range(slots)) == list(range(slots)), "all slots are free again"
