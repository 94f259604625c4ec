from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from draftmill.data.config import PrepareConfig
from draftmill.data.plan import BatchPlan, pack, seeded_order
from draftmill.data.prepare import prepare
from draftmill.data.prepared import PreparedSet
from draftmill.errors import UserError

MakeSet = Callable[[list[tuple[int, int]]], PreparedSet]


@pytest.fixture
def make_set(make_target: Any, write_rows: Any, tmp_path: Path) -> MakeSet:
    """[(prompt tokens, answer tokens)] → prepared set; document d holds the token d throughout."""

    def make(shapes: list[tuple[int, int]]) -> PreparedSet:
        rows = [
            {"input_ids": [number] * (prompt + answer), "loss_mask": [0] * prompt + [1] * answer}
            for number, (prompt, answer) in enumerate(shapes)
        ]
        path = write_rows(rows)
        config = PrepareConfig(inputs=[path], output=tmp_path / "set", model=str(make_target()), workers=1)
        prepare(config, overwrite=True)
        return PreparedSet.open(config.output)

    return make


@given(st.lists(st.integers(2, 200), min_size=1, max_size=80), st.integers(16, 100), st.integers(0, 3))
@hypothesis_settings(deadline=None, max_examples=60)
def test_pack_keeps_each_document_once_and_the_budget(lengths: list[int], budget: int, seed: int) -> None:
    sizes = np.array(lengths)
    bins = pack(sizes, budget, seed)
    assert sorted(np.concatenate([bins[number] for number in range(len(bins))]).tolist()) == list(range(len(lengths)))
    loads = [int(np.minimum(sizes[bins[number]], budget).sum()) for number in range(len(bins))]
    assert all(0 < load <= budget for load in loads)
    # A new bin is opened only when nothing fits: no two bins could be one.
    assert all(first + second > budget for place, first in enumerate(loads) for second in loads[place + 1 :])
    again = pack(sizes, budget, seed)
    np.testing.assert_array_equal(bins.members, again.members)
    np.testing.assert_array_equal(bins.starts, again.starts)


def test_pack_is_quick_and_tight() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 100_000).astype(np.int64) + 2
    started = time.perf_counter()
    bins = pack(lengths, 16384, 0)
    assert time.perf_counter() - started < 5  # 0.1 s on an idle core
    assert 1 - np.minimum(lengths, 16384).sum() / (len(bins) * 16384) < 0.01


def test_seed_and_key_change_the_order_and_nothing_else_does() -> None:
    assert seeded_order(8, "epoch", "print", 0, 0).tolist() == seeded_order(8, "epoch", "print", 0, 0).tolist()
    orders = {tuple(seeded_order(50, *key)) for key in [("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 0, 0)]}
    assert len(orders) == 4
    # A change of these numbers would break the resumption of every run.
    assert seeded_order(8, "pack", 0).tolist() == [4, 0, 2, 6, 7, 5, 1, 3]


def test_every_document_once_per_epoch_in_another_order(make_set: MakeSet) -> None:
    prepared = make_set([(3, 4 + number % 9) for number in range(60)])
    plan = BatchPlan(prepared, 32, seed=1)
    epochs = [
        [plan.batch(epoch * plan.batches_per_epoch + place) for place in range(plan.batches_per_epoch)]
        for epoch in range(2)
    ]
    for number, batches in enumerate(epochs):
        assert sorted(document for batch in batches for document in batch.documents) == list(range(60))
        assert {batch.epoch for batch in batches} == {number}
        assert sorted(batch.bin for batch in batches) == list(range(plan.batches_per_epoch))
    assert [batch.bin for batch in epochs[0]] != [batch.bin for batch in epochs[1]]
    by_bin = {batch.bin: batch for batch in epochs[0]}
    for batch in epochs[1]:
        assert batch.documents == by_bin[batch.bin].documents
        assert batch.input_ids.equal(by_bin[batch.bin].input_ids)


def test_batch_is_a_pure_function_of_its_index(make_set: MakeSet) -> None:
    prepared = make_set([(2, 5)] * 40)
    plan, again = BatchPlan(prepared, 20, seed=3), BatchPlan(PreparedSet.open(prepared.folder), 20, seed=3)
    for index in (57, 0, 31):
        assert plan.locate(index) == again.locate(index) == (plan.batch(index).epoch, plan.batch(index).bin)
        assert plan.batch(index).documents == again.batch(index).documents
        assert plan.batch(index).index == index
    other = BatchPlan(prepared, 20, seed=4)
    assert [other.batch(index).documents for index in range(9)] != [plan.batch(index).documents for index in range(9)]
    with pytest.raises(ValueError):
        plan.locate(-1)


def test_batch_fields(make_set: MakeSet) -> None:
    batch = BatchPlan(make_set([(1, 3), (2, 5)]), 16, seed=0).batch(0)
    lengths = [4 if document == 0 else 7 for document in batch.documents]
    assert [str(getattr(batch, name).dtype) for name in ("input_ids", "loss_mask", "position_ids", "document_ids")] == [
        "torch.int32",
        "torch.bool",
        "torch.int32",
        "torch.int32",
    ]
    assert (batch.token_budget, batch.tokens) == (16, 11)
    assert batch.input_ids.tolist() == [batch.documents[0]] * lengths[0] + [batch.documents[1]] * lengths[1] + [0] * 5
    assert batch.position_ids.tolist() == [*range(lengths[0]), *range(lengths[1])] + [0] * 5
    assert batch.document_ids.tolist() == [0] * lengths[0] + [1] * lengths[1] + [-1] * 5
    assert batch.spans() == [(0, lengths[0]), (lengths[0], 11)]
    assert int(batch.loss_mask.sum()) == 8
    assert not batch.loss_mask[11:].any()


def test_case_08_document_exactly_as_long_as_the_budget_and_longer(make_set: MakeSet) -> None:
    prepared = make_set([(8, 8), (8, 9), (1, 2)])
    plan = BatchPlan(prepared, 16, seed=0)
    assert (plan.cut_documents, plan.left_out_documents, plan.batches_per_epoch) == (1, 0, 3)
    batches = {plan.batch(index).documents: plan.batch(index) for index in range(3)}
    assert batches[(0,)].tokens == batches[(1,)].tokens == 16
    assert batches[(2,)].tokens == 3
    assert plan.padding_share == pytest.approx(13 / 48)


def test_case_08_answer_beyond_the_budget_is_left_out_and_counted(make_set: MakeSet) -> None:
    # 15 prompt tokens leave one answer token in the budget of 16: no pair to train; 14 leave two.
    prepared = make_set([(15, 9), (14, 9), (40, 5), (2, 2)])
    plan = BatchPlan(prepared, 16, seed=0)
    assert (plan.left_out_documents, plan.cut_documents) == (2, 1)
    used = [document for index in range(plan.batches_per_epoch) for document in plan.batch(index).documents]
    assert sorted(used) == [1, 3]
    with pytest.raises(UserError, match=r"Raise `data\.token_budget`"):
        BatchPlan(make_set([(40, 5)]), 16, seed=0)


def test_case_08_one_trained_pair_is_a_batch(make_set: MakeSet) -> None:
    plan = BatchPlan(make_set([(1, 2)]), 16, seed=0)
    assert plan.batches_per_epoch == 1
    assert plan.batch(5).epoch == 5
    assert plan.batch(5).tokens == 3


@pytest.mark.slow
def test_padding_on_real_answers(smollm2: Path, tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "../shared/data"
    inputs = [folder / "smollm2_greedy.jsonl", folder / "smollm2_t07.jsonl"]
    if not all(path.is_file() for path in inputs):
        pytest.skip("the answers of SmolLM2 are not here")
    config = PrepareConfig(inputs=inputs, output=tmp_path / "set", model=str(smollm2))
    prepare(config)
    assert BatchPlan(PreparedSet.open(config.output), 16384, seed=0).padding_share < 0.03
