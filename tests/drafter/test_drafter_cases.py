"""Faults that drafter trainers have had, each impossible here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_drafter_reference import BASE, SPECS

from draftmill.drafter.anchors import draw_anchors, valid_anchors
from draftmill.drafter.attention import by_document, dense, visible
from draftmill.drafter.blocks import Blocks, default_gamma, make_blocks, slot_weights
from draftmill.drafter.config import DrafterConfig, DrafterSpec, default_taps
from draftmill.drafter.loss import label_rank, linear_cross_entropy
from draftmill.drafter.metrics import block_sums, summarise
from draftmill.drafter.model import Drafter, initialise
from draftmill.drafter.objective import block_hidden


def blocks_at(anchors: list[int], total: int, spec: DrafterSpec, *, mask: torch.Tensor | None = None,
              documents: torch.Tensor | None = None, ids: torch.Tensor | None = None) -> Blocks:  # fmt: skip
    documents = torch.zeros(total, dtype=torch.long) if documents is None else documents
    positions = torch.cat([torch.arange(int((documents == d).sum())) for d in documents.unique_consecutive()])
    return make_blocks(
        torch.arange(total) if ids is None else ids,
        torch.ones(total, dtype=torch.bool) if mask is None else mask,
        positions, documents, torch.tensor(anchors),
        block_size=spec.block_size, mask_token_id=spec.mask_token_id, gamma=4.0,
    )  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("how", [dense, by_document])
def test_case_16_blocks_see_neither_the_state_at_their_anchor_nor_each_other(name: str, how) -> None:
    spec = replace(SPECS[name], block_size=8, vocab_size=40)
    torch.manual_seed(0)
    drafter = Drafter(spec)
    initialise(drafter, 0, std=0.3)
    total, anchors = 30, [10, 12]
    positions, documents = torch.arange(total), torch.zeros(total, dtype=torch.long)
    embedding = torch.randn(40, spec.hidden_size)
    features = torch.randn(total, len(spec.taps) * spec.hidden_size)

    def run(states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        blocks = blocks_at(anchors, total, spec, ids=ids)
        with torch.no_grad():
            return block_hidden(drafter, states, positions, blocks, embedding, how(spec, blocks, documents, positions))

    ids = torch.arange(total)
    before = run(features, ids)
    for block, anchor in enumerate(anchors):
        changed = features.clone()
        changed[anchor:] = torch.randn_like(changed[anchor:])
        assert torch.equal(run(changed, ids)[block], before[block]), "a block saw a state at or behind its anchor"
        changed = features.clone()
        changed[anchor - 1] += 1
        assert not torch.equal(run(changed, ids)[block], before[block]), "a block does not see the state before it"
    other = ids.clone()
    other[12] = 39  # the bonus token of the second block
    assert torch.equal(run(features, other)[0], before[0]), "the first block saw the second"
    assert not torch.equal(run(features, other)[1], before[1])


def test_case_17_full_layers_look_ahead_inside_the_block_and_causal_ones_do_not() -> None:
    total = 20
    blocks = blocks_at([6, 9], total, BASE)
    documents, positions = torch.zeros(total, dtype=torch.long), torch.arange(total)
    both = visible(blocks, documents, positions, window=None, causal=False)[:, total:]
    causal = visible(blocks, documents, positions, window=None, causal=True)[:, total:]
    own = torch.block_diag(torch.ones(5, 5), torch.ones(5, 5)).bool()
    assert torch.equal(both, own)
    assert torch.equal(causal, own & torch.ones(10, 10).tril().bool())
    drafter = Drafter(BASE)
    initialise(drafter, 0, std=0.3)
    features = torch.randn(total, 72)
    context = drafter.context_keys_values(drafter.context(features), positions)
    attend = dense(BASE, blocks, documents, positions)
    tokens = torch.randn(10, 24)
    last = tokens.clone()
    last[4] += 1
    first = drafter(tokens, blocks.position_ids.flatten(), context, attend)
    second = drafter(last, blocks.position_ids.flatten(), context, attend)
    assert not torch.equal(first[0], second[0]), "perturbing the last slot must change the first"
    assert torch.equal(first[5:], second[5:])


def test_sliding_window_counts_positions_from_each_slot() -> None:
    blocks = blocks_at([10], 20, BASE)
    seen = visible(blocks, torch.zeros(20, dtype=torch.long), torch.arange(20), window=4, causal=True)[:, :20]
    for slot in range(5):
        expected = [c for c in range(10) if (10 + slot) - c < 4]
        assert seen[slot].nonzero().squeeze(-1).tolist() == expected


def test_case_18_slot_k_learns_the_token_at_p_plus_k() -> None:
    ids = torch.arange(100, 120)
    blocks = blocks_at([4], 20, BASE, ids=ids)
    assert blocks.tokens.tolist() == [[104, 36, 36, 36, 36]]
    assert blocks.labels.tolist() == [[104, 105, 106, 107, 108]]  # slot 0 has weight 0
    assert blocks.position_ids.tolist() == [[4, 5, 6, 7, 8]]
    assert torch.allclose(blocks.weights[0], torch.tensor([0.0, 1.0, *torch.exp(-torch.tensor([1.0, 2, 3]) / 4)]))


def test_case_20_every_valid_anchor_is_equally_likely_and_tails_end_with_their_document() -> None:
    documents = torch.tensor([0] * 40 + [1] * 4 + [2] * 6)
    mask = torch.ones(50, dtype=torch.bool)
    valid = valid_anchors(mask, documents)
    assert 39 not in valid  # its successor is another document's
    assert 43 not in valid
    drawn = torch.zeros(50)
    for epoch in range(3000):
        anchors = draw_anchors(valid, 5, seed=1, epoch=epoch, index=0)
        assert len(set(anchors.tolist())) == 5
        drawn[anchors] += 1
    share = drawn[valid] / 3000
    expected = 5 / len(valid)
    spread = (expected * (1 - expected) / 3000) ** 0.5
    assert (share - expected).abs().max() < 4.5 * spread, "short documents are not drawn as often as long ones"
    tail = blocks_at([42], 50, BASE, documents=documents)
    assert (tail.weights[0] > 0).tolist() == [False, True, False, False, False]


def test_labels_behind_a_turn_that_ended_are_not_learned() -> None:
    mask = torch.ones(20, dtype=torch.bool)
    mask[7] = False  # the user's turn; 8 is the assistant's again
    blocks = blocks_at([4], 20, BASE, mask=mask)
    assert (blocks.weights[0] > 0).tolist() == [False, True, True, False, False]


def test_case_24_a_batch_without_anchors_has_only_padding() -> None:
    anchors = draw_anchors(torch.empty(0, dtype=torch.long), 4, seed=0, epoch=0, index=0)
    assert anchors.tolist() == [-1] * 4
    blocks = blocks_at(anchors.tolist(), 20, BASE)
    assert float(blocks.weights.sum()) == 0
    seen = visible(blocks, torch.zeros(20, dtype=torch.long), torch.arange(20), window=None, causal=False)
    assert not seen[:, :20].any()
    assert seen.any(dim=1).all()  # no row of a softmax is empty


def test_anchors_are_a_function_of_seed_epoch_and_index_alone() -> None:
    valid = torch.arange(200)

    def draw(seed: int, epoch: int, index: int) -> list[int]:
        return draw_anchors(valid, 12, seed=seed, epoch=epoch, index=index).tolist()

    torch.manual_seed(5)
    first = draw(0, 1, 2)
    torch.manual_seed(6)
    torch.rand(10)
    assert draw(0, 1, 2) == first == sorted(first)
    assert len({tuple(draw(*key)) for key in [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3), (0, 2, 1)]}) == 5
    assert draw_anchors(valid[:3], 5, seed=0, epoch=0, index=0).tolist() == [0, 1, 2, -1, -1]


def test_case_21_accepted_length_is_a_mean_of_runs_not_a_product_of_means() -> None:
    # Right drafts in two blocks of three slots: 3 and 1 of the first pair, 2 and 0 of the second.
    nll, weights, real = torch.ones(2, 4), slot_weights(4, 4.0).expand(2, 4), torch.tensor([True, True])
    first = block_sums(nll, torch.tensor([[9, 0, 0, 0], [9, 0, 5, 0]]), weights, real)
    second = block_sums(nll, torch.tensor([[9, 0, 0, 5], [9, 5, 0, 5]]), weights, real)
    assert summarise(first)["tau_teacher_forced"] - 1 == pytest.approx((3 + 1) / 2)
    assert summarise(second)["tau_teacher_forced"] - 1 == pytest.approx((2 + 0) / 2)
    both = summarise(first + second)
    assert both["tau_teacher_forced"] - 1 == pytest.approx(1.5)
    assert both["slot_top1"] == [0.75, 0.75, 0.5]
    unconditional = 0.75 + 0.75 * 0.75 + 0.75 * 0.75 * 0.5  # a product of the batch's means says something else
    assert abs(unconditional - 1.5) > 0.05
    assert both["slot_acceptance"] == [0.75, pytest.approx(2 / 3), 0.5]  # given a right prefix


def test_blocks_cut_by_the_end_count_only_the_slots_they_have() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.7, 0.5]])
    rank = torch.zeros(2, 4, dtype=torch.long)
    result = summarise(block_sums(torch.ones(2, 4), rank, weights, torch.tensor([True, True])))
    assert result["tau_teacher_forced"] == pytest.approx((2 + 4) / 2)
    assert result["slot_top1"] == [1.0, 1.0, 1.0]
    assert result["accuracy"] == 1.0


def test_top_k_hits_count_ranks() -> None:
    logits = torch.tensor([[5.0, 4, 3, 2, 1, 0, -1, -2, -3, -4]]).repeat(4, 1)
    assert label_rank(logits, torch.tensor([0, 3, 7, 9])).tolist() == [0, 3, 7, 9]


def test_a_tie_goes_to_the_token_that_argmax_takes() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    assert logits.argmax(-1).item() == 1
    assert label_rank(logits, torch.tensor([1])).item() == 0
    assert label_rank(logits, torch.tensor([2])).item() == 1


def test_fused_loss_equals_float64_and_leaves_the_head_alone() -> None:
    torch.manual_seed(3)
    hidden = torch.randn(33, 16, dtype=torch.float64, requires_grad=True)
    head = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    labels, weights = torch.randint(0, 50, (33,)), torch.rand(33)
    loss, stats = linear_cross_entropy(hidden, head, labels, weights, chunk_rows=8)
    (3 * loss).backward()
    gradient, hidden.grad = hidden.grad, None
    plain = torch.nn.functional.cross_entropy(hidden @ head.T, labels, reduction="none")
    (3 * (plain * weights).sum()).backward()
    assert head.grad is not None  # from the plain path only
    torch.testing.assert_close(gradient, hidden.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stats.nll.double(), plain.detach(), rtol=1e-5, atol=1e-6)
    head.grad = None
    linear_cross_entropy(hidden, head, labels, weights, chunk_rows=8)[0].backward()
    assert head.grad is None


def test_default_taps_are_the_papers() -> None:
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert default_taps(64, 5) == (1, 16, 31, 46, 61)
    assert default_taps(30, 5) == (1, 8, 14, 20, 27)


def test_gamma_defaults() -> None:
    assert [default_gamma(b) for b in (16, 10, 8)] == [7.0, 5.0, 4.0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layers": 2, "layer_types": ["full_attention"]}, "layer_types names 1 layers but layers is 2"),
        ({"layers": 1, "layer_types": ["sliding_attention"]}, "sliding_window is not set"),
        ({"sliding_window": 128}, "no layer slides"),
        ({"taps": [3, 1]}, "increasing"),
        ({"block_size": 1}, "greater than or equal to 2"),
    ],
)
def test_impossible_drafters_are_refused(values: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DrafterConfig(**values)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    one, two, three = Drafter(BASE), Drafter(BASE), Drafter(BASE)
    initialise(one, 7)
    torch.rand(3)
    initialise(two, 7)
    initialise(three, 8)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, three.fc.weight)
