"""The fused step against the plain one: loss, statistics and every gradient, over groups and kinds of layers."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
pytest.importorskip("triton")

from draftmill.drafter.config import FULL, SLIDING, DrafterSpec
from draftmill.drafter.metrics import Sums
from draftmill.drafter.model import Drafter, initialise
from draftmill.records import PADDING_DOCUMENT, HiddenBatch, TokenBatch
from draftmill.train.fused_step import FusedStep, Inputs, parts
from draftmill.train.step import PlainStep, StepSettings, batch_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = DrafterSpec(
    hidden_size=48, intermediate_size=80, num_attention_heads=3, num_key_value_heads=1, head_dim=64, rms_norm_eps=1e-6,
    rope_theta=10000.0, block_size=4, mask_token_id=99, taps=(0, 2), layer_types=(SLIDING, FULL),
    layer_causal=(True, False), sliding_window=9, vocab_size=101, num_target_layers=4, max_position_embeddings=128,
)  # fmt: skip
SETTINGS = StepSettings(anchors=14, gamma=4.0, seed=3, dtype=torch.float32, fused_rows=47)


def make_batch(seed: int, lengths: tuple[int, ...] = (21, 3, 17), padding: int = 6, learn: bool = True) -> HiddenBatch:
    draw = torch.Generator().manual_seed(seed)
    total = sum(lengths) + padding
    ids = torch.randint(0, 99, (total,), generator=draw, dtype=torch.int32)
    documents = torch.full((total,), PADDING_DOCUMENT, dtype=torch.int32)
    positions = torch.zeros(total, dtype=torch.int32)
    start = 0
    for number, length in enumerate(lengths):
        documents[start : start + length] = number
        positions[start : start + length] = torch.arange(length)
        start += length
    mask = (torch.rand(total, generator=draw) < 0.8) & (documents >= 0) & learn
    tokens = TokenBatch(ids, mask, positions, documents, tuple(range(len(lengths))), index=5, bin=5, epoch=1)
    features = torch.randn(total, len(SPEC.taps) * SPEC.hidden_size, generator=draw)
    return HiddenBatch(tokens, features.to(DEVICE), "cafe", SPEC.taps)


def matrices(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed + 1)
    embedding, head = (torch.randn(SPEC.vocab_size, SPEC.hidden_size, generator=draw).to(DEVICE) for _ in range(2))
    return embedding, head * 0.3


def both(seed: int, settings: StepSettings, spec: DrafterSpec = SPEC, **options: Any) -> tuple[Any, Any]:
    """(plain, fused) drafters of the same weights with their steps."""
    made = []
    for kind in (PlainStep, FusedStep):
        drafter = Drafter(spec)
        initialise(drafter, seed, std=0.15)
        drafter = drafter.to(DEVICE)
        embedding, head = (matrix.to(settings.dtype) for matrix in matrices(seed))
        if kind is PlainStep:
            made.append((drafter, PlainStep(drafter, embedding, head, settings, always_run=False)))
        else:
            made.append((drafter, FusedStep(drafter, embedding, head, settings, **options).prepare()))
    return made[0], made[1]


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, name: str = "") -> None:
    scale = float(wanted.abs().max())
    assert torch.isfinite(found).all(), name
    assert float((found.float() - wanted.float()).abs().max()) <= tolerance * scale, name


def check(plain: Drafter, fused: Drafter, sums: tuple[Sums, Sums], tolerance: float) -> None:
    assert float(sums[0].totals[3]) > 0
    close(sums[1].slots[0:1], sums[0].slots[0:1], 0.0, "supervised slots")
    close(sums[1].totals, sums[0].totals, tolerance, "totals")
    others = dict(fused.named_parameters())
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert float(parameter.grad.abs().max()) > 0, name
        close(others[name].grad, parameter.grad, tolerance, name)


@pytest.mark.parametrize("groups", [1, 3])
def test_the_fused_step_computes_what_the_plain_step_computes(groups: int) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    (plain, plain_step), (fused, fused_step) = both(seed, SETTINGS, groups=groups, graph=False)
    sums = plain_step(make_batch(seed)), fused_step(make_batch(seed))
    check(plain, fused, sums, 2e-5)
    assert torch.equal(sums[0].slots[2:], sums[1].slots[2:]), "ranks and hits"


def test_more_anchors_than_valid_positions_and_gradients_that_add_up() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    (plain, plain_step), (fused, fused_step) = both(seed, replace(SETTINGS, anchors=50), groups=2, graph=False)
    total = [plain_step(make_batch(seed + n, (5, 9), padding=33)) for n in range(2)]
    own = [fused_step(make_batch(seed + n, (5, 9), padding=33)) for n in range(2)]
    check(plain, fused, (total[0] + total[1], own[0] + own[1]), 2e-5)
    fused_step.clear()
    assert all(not parameter.grad.any() for parameter in fused.parameters())


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter cannot multiply bfloat16")
def test_in_bfloat16_the_fused_step_is_as_near_to_float32_as_the_plain_one() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    settings = replace(SETTINGS, dtype=torch.bfloat16)
    (exact, exact_step), _ = both(seed, SETTINGS, groups=1, graph=False)
    (plain, plain_step), (fused, fused_step) = both(seed, settings, groups=1, graph=False)
    for step in (exact_step, plain_step, fused_step):
        step(make_batch(seed))
    for (name, wanted), one, two in zip(exact.named_parameters(), plain.parameters(), fused.parameters(), strict=True):
        error = [float((p.grad - wanted.grad).norm() / wanted.grad.norm()) for p in (one, two)]
        assert error[1] < max(1.5 * error[0], 0.02), f"{name}: plain {error[0]:.4f}, fused {error[1]:.4f}"


def test_a_batch_without_anchors_adds_nothing_even_if_its_states_are_nan() -> None:
    _, (fused, step) = both(0, SETTINGS, groups=1, graph=False)
    batch = make_batch(0, learn=False)
    sums = step(replace(batch, features=batch.features * torch.nan))
    assert not sums.slots.any()
    assert not sums.totals.any()
    assert all(not parameter.grad.any() for parameter in fused.parameters())


def test_the_weights_follow_the_masters() -> None:
    seed = random.randrange(1 << 30)
    (plain, plain_step), (fused, fused_step) = both(seed, SETTINGS, groups=1, graph=False)
    for drafter in (plain, fused):
        for parameter in drafter.parameters():
            parameter.data.mul_(1.25)
    fused_step.updated()
    check(plain, fused, (plain_step(make_batch(seed)), fused_step(make_batch(seed))), 2e-5)


def test_inputs_come_out_as_they_went_in() -> None:
    batch = make_batch(1)
    drafter = Drafter(SPEC)
    blocks = batch_blocks(batch, drafter, SETTINGS)
    packed = Inputs.pack(blocks, batch.tokens.position_ids)
    rows = batch.tokens.token_budget
    assert packed.numel() == Inputs.size(rows, SETTINGS.anchors, SPEC.block_size)
    inputs = Inputs.unpack(packed, rows, SETTINGS.anchors, SPEC.block_size)
    assert torch.equal(inputs.position_ids, batch.tokens.position_ids)
    for name in ("anchors", "labels", "weights"):
        assert torch.equal(getattr(inputs, name), getattr(blocks, name)), name
    real = blocks.anchors >= 0
    assert torch.equal(inputs.first_tokens[real].long(), blocks.tokens[real, 0])
    assert torch.equal(batch.tokens.position_ids[inputs.starts[real]], torch.zeros(int(real.sum()), dtype=torch.int32))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_a_captured_step_is_the_same_step_and_gradients_before_it_stay() -> None:
    settings = replace(SETTINGS, dtype=torch.bfloat16)
    made = []
    for graph in (False, True):
        _, (drafter, step) = both(5, settings, groups=2, graph=graph)
        for parameter in drafter.parameters():
            parameter.grad.add_(0.5)
        totals = [step(make_batch(number)).totals.clone() for number in (1, 2, 3)]
        made.append((torch.stack(totals), [parameter.grad.clone() for parameter in drafter.parameters()]))
    assert torch.equal(made[0][0], made[1][0])
    assert all(torch.equal(one, two) for one, two in zip(made[0][1], made[1][1], strict=True))


@pytest.mark.parametrize(("anchors", "groups", "sizes"), [(8, 2, [4, 4]), (7, 3, [3, 3, 1]), (5, 1, [5])])
def test_groups_hold_every_anchor_once(anchors: int, groups: int, sizes: list[int]) -> None:
    found = parts(anchors, groups)
    assert [part.stop - part.start for part in found] == sizes
    assert [n for part in found for n in range(part.start, part.stop)] == list(range(anchors))
