"""States kept across epochs are the states, and the memory for them is bounded."""

from __future__ import annotations

from pathlib import Path

import torch
from target_models import HIDDEN, batch_of, documents, load
from torch import Tensor

from draftmill.handoff.memory import MemoryRing
from draftmill.records import TokenBatch
from draftmill.run.sources import InlineSource
from draftmill.run.states import States
from draftmill.target.checks import StateCheck
from draftmill.target.reuse import ReusedStates

BUDGET, BINS = 24, 3
TEXTS = [documents([9, 7], seed=0), documents([20], seed=1), documents([3, 3, 3], seed=2)]
ORDERS = [[0, 1, 2], [2, 0, 1]]  # of the bins, by epoch


class FixedPlan:
    def batch(self, index: int) -> TokenBatch:
        epoch, place = divmod(index, BINS)
        number = ORDERS[epoch][place]
        return batch_of(TEXTS[number], BUDGET, index=index, bin=number)


def run(folder: Path, reuse: ReusedStates) -> tuple[list[Tensor], list[int]]:
    """Features of both epochs, and the indices for which the target ran."""
    target = load(folder)
    ran: list[int] = []
    begin = target.begin

    def counted(batch: TokenBatch, features: Tensor) -> StateCheck:
        ran.append(batch.index)
        return begin(batch, features)

    target.begin = counted
    ring = MemoryRing(1, BUDGET, target.features_width, dtype=target.dtype, device="cpu")
    released: list[int] = []
    source = InlineSource(
        FixedPlan(), States(target, reuse), ring, may_take=lambda index: index < 2 * BINS, on_release=released.append
    )
    seen = []
    for index in range(2 * BINS):
        batch = source.take(index)
        assert batch.tokens.index == index
        assert (batch.target_fingerprint, batch.taps) == (target.fingerprint, target.taps)
        seen.append(batch.features.clone())
        batch.features.fill_(torch.nan)  # a slot may hold anything when it is used again
        source.release(index)
    assert source.take(2 * BINS) is None
    assert released == list(range(2 * BINS))
    return seen, ran


def test_a_second_epoch_from_memory_is_bit_identical_to_a_computed_one(folders: dict[str, Path]) -> None:
    computed, ran = run(folders["llama"], ReusedStates(0))
    assert ran == [0, 1, 2, 3, 4, 5]
    reused, ran = run(folders["llama"], ReusedStates(10**9))
    assert ran == [0, 1, 2]
    per_token = 2 * HIDDEN * 4
    some, ran = run(folders["llama"], ReusedStates(26 * per_token))  # bins 0 (16 tokens) and 2 (9), not 1 (20)
    assert ran == [0, 1, 2, 5]
    for epoch, order in enumerate(ORDERS):
        for place, number in enumerate(order):
            at = epoch * BINS + place
            assert torch.equal(computed[at], computed[number]), "epoch 1 took the bins in order"
            assert torch.equal(reused[at], computed[at])
            assert torch.equal(some[at], computed[at])
    assert not torch.equal(computed[0], computed[1])


def test_kept_states_come_back_exactly_and_do_not_share_memory() -> None:
    states = torch.randn(5, 4, dtype=torch.float32).bfloat16()
    reuse = ReusedStates(10**6)
    features = states.clone()
    reuse.keep(3, features)
    features.zero_()
    into = torch.full((8, 4), torch.nan, dtype=torch.bfloat16)
    assert not reuse.load(2, into)
    assert into.isnan().all(), "an unknown bin must leave the buffer alone"
    assert reuse.load(3, into)
    assert torch.equal(into[:5], states)
    assert torch.equal(into[5:], torch.zeros(3, 4, dtype=torch.bfloat16))


def test_the_byte_limit_is_kept_and_nothing_is_evicted() -> None:
    reuse = ReusedStates(100)
    into = torch.empty(10, 1)
    reuse.keep(0, torch.ones(10, 1))  # 40 bytes
    reuse.keep(1, torch.ones(16, 1))  # 64: over the limit
    assert reuse.bytes == 40
    reuse.keep(2, torch.ones(15, 1))  # 60: exactly full
    assert reuse.bytes == 100
    reuse.keep(3, torch.ones(1, 1))
    assert reuse.bytes == 100
    assert [reuse.load(bin, torch.empty(16, 1)) for bin in range(4)] == [True, False, True, False]
    assert reuse.load(0, into)
    assert torch.equal(into, torch.ones(10, 1))
