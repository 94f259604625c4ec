"""The update: its rate, its normalisation, and what it does with gradients that are none."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from train_tiny import SETTINGS, gradients, hidden_batch, make_drafter, matrix, same, weights

from draftmill.train.config import TrainConfig
from draftmill.train.optim import MuonAndAdamW, apply_update, learning_rate, make_optimizer
from draftmill.train.step import micro_step


def test_learning_rate_rises_linearly_and_falls_as_a_cosine_to_zero() -> None:
    rates = [learning_rate(step, 100, 6e-4, 0.04) for step in range(101)]
    assert rates[:4] == pytest.approx([1.5e-4, 3e-4, 4.5e-4, 6e-4], rel=1e-12)
    assert rates[4] == pytest.approx(6e-4, rel=1e-12)
    assert rates[52] == pytest.approx(3e-4, rel=1e-12)  # half of the 96 steps behind the warm-up
    assert rates[28] == pytest.approx(6e-4 * (1 + math.sqrt(0.5)) / 2, rel=1e-12)
    assert rates[100] == pytest.approx(0.0, abs=1e-18)
    assert 0 < rates[99] < 1e-6
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))


def test_the_original_runs_schedule() -> None:
    """29,912 steps, 1,196 of them warm-up."""
    assert learning_rate(1195, 29_912, 6e-4, 0.04) == 6e-4
    assert learning_rate(1194, 29_912, 6e-4, 0.04) == pytest.approx(6e-4 * 1195 / 1196)
    assert learning_rate(1197, 29_912, 6e-4, 0.04) < 6e-4


@pytest.mark.parametrize(
    ("step", "total", "ratio", "wanted"),
    [(0, 1, 0.04, 1.0), (0, 10, 0.0, 1.0), (0, 2, 0.9, 0.5), (1, 2, 0.9, 1.0), (10, 10, 0.0, 0.0), (25, 10, 0.1, 0.0)],
)
def test_learning_rate_at_the_edges(step: int, total: int, ratio: float, wanted: float) -> None:
    assert learning_rate(step, total, 1.0, ratio) == pytest.approx(wanted, abs=1e-15)


@given(total=st.integers(1, 2000), ratio=st.floats(0, 0.99), share=st.floats(0, 0.999))
def test_learning_rate_is_positive_while_training_and_never_above_the_peak(
    total: int, ratio: float, share: float
) -> None:
    assert 0 < learning_rate(int(share * total), total, 3.0, ratio) <= 3.0


def accumulate(groups: list[list[int]]) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """Gradients, Σ w and updated weights after micro-steps over documents 0, 1, 2 … grouped like this."""
    drafter = make_drafter()
    parameters = list(drafter.parameters())
    optimizer = make_optimizer(parameters, TrainConfig(lr=1e-2))
    head, weight, first = matrix(), torch.zeros((), dtype=torch.float64), 0
    for group in groups:
        batch = hidden_batch(group, first=first, index=first)
        sums = micro_step(drafter, batch, embedding=head, head=head, settings=SETTINGS)
        weight, first = weight + sums.totals[1], first + len(group)
    collected = gradients(drafter)
    update = apply_update(parameters, optimizer, weight=weight, lr=1e-2, clip=1.0)
    drafter.zero_grad()
    assert update.done
    assert update.norm > 0
    return collected, float(weight), weights(drafter)


@pytest.mark.parametrize("groups", [[[1, 1], [4, 4]], [[1, 1, 4], [4]], [[1], [1], [4], [4]]])
def test_case_19_how_anchors_fall_over_micro_steps_does_not_matter(groups: list[list[int]]) -> None:
    whole, whole_weight, whole_after = accumulate([[1, 1, 4, 4]])
    parts, parts_weight, parts_after = accumulate(groups)
    w = [math.exp(-k / 4.0) for k in range(3)]
    # a document with n anchors has n supervised tokens behind its first: slots 1 … min(3, n), min(3, n − 1), …
    expected = sum(sum(w[: min(3, n - a)]) for n in (1, 1, 4, 4) for a in range(n))
    assert whole_weight == pytest.approx(expected, rel=1e-6)
    assert parts_weight == pytest.approx(expected, rel=1e-6)
    assert whole.keys() == parts.keys()
    assert len(whole) == len(list(make_drafter().parameters()))
    for name, gradient in whole.items():
        scale = float(gradient.abs().max())
        assert scale > 0
        assert torch.allclose(parts[name], gradient, rtol=0, atol=2e-5 * scale), name
        assert torch.allclose(parts_after[name], whole_after[name], rtol=0, atol=1e-4), name  # of a step of 1e-2


def test_case_19_the_mean_of_micro_step_means_would_be_another_update() -> None:
    """So the test before this one can fail: normalising each micro-step on its own gives another direction."""
    drafter, head = make_drafter(), matrix()
    whole, _, _ = accumulate([[1, 1, 4, 4]])
    mean: dict[str, Tensor] = {}
    for first, group in ((0, [1, 1]), (2, [4, 4])):
        sums = micro_step(drafter, hidden_batch(group, first=first), embedding=head, head=head, settings=SETTINGS)
        for name, gradient in gradients(drafter).items():
            mean[name] = mean.get(name, 0) + gradient / float(sums.totals[1])
        drafter.zero_grad()
    a, b = (torch.cat([g[name].flatten() for name in whole]) for g in (whole, mean))
    assert torch.cosine_similarity(a, b, dim=0) < 0.99


def test_the_gradient_is_divided_by_the_weight_and_clipped_to_the_norm() -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([parameter], lr=123.0)
    parameter.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    update = apply_update([parameter], optimizer, weight=torch.tensor(10.0), lr=1.0, clip=1.0)
    assert (float(update.norm), bool(update.done)) == (pytest.approx(0.5), True)
    assert torch.allclose(parameter, -torch.tensor([[0.3, 0.0], [0.0, 0.4]]))
    parameter.data.zero_()
    parameter.grad = torch.tensor([[30.0, 0.0], [0.0, 40.0]])
    update = apply_update([parameter], optimizer, weight=torch.tensor(10.0), lr=1.0, clip=1.0)
    assert (float(update.norm), bool(update.done)) == (pytest.approx(5.0), True)
    assert torch.allclose(parameter, -torch.tensor([[0.6, 0.0], [0.0, 0.8]]), atol=1e-5)


@pytest.mark.parametrize("size", [0.3, 30.0])
def test_adamw_takes_the_normalised_and_clipped_gradient(size: float) -> None:
    """The fused kernel divides by itself; a plain AdamW in float64 of the divided gradient is the reference."""
    draw = torch.Generator().manual_seed(7)
    start, raw = torch.randn(5, 3, generator=draw), [torch.randn(5, 3, generator=draw) * size for _ in range(3)]
    parameter, plain = nn.Parameter(start.clone()), nn.Parameter(start.double())
    optimizer = make_optimizer([parameter], TrainConfig(weight_decay=0.1))
    reference = torch.optim.AdamW([plain], lr=1.0, weight_decay=0.1)
    for step, gradient in enumerate(raw):
        parameter.grad = gradient.clone()
        apply_update([parameter], optimizer, weight=torch.tensor(2.5), lr=0.1 / (step + 1), clip=1.0)
        wanted = gradient.double() / 2.5
        plain.grad = wanted * min(1.0, 1.0 / float(wanted.norm()))
        reference.param_groups[0]["lr"] = 0.1 / (step + 1)
        reference.step()
    assert torch.allclose(parameter.double(), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_case_23_a_non_finite_gradient_changes_no_bit(bad: float) -> None:
    drafter = make_drafter()
    parameters = list(drafter.parameters())
    optimizer = make_optimizer(parameters, TrainConfig(weight_decay=0.1))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert apply_update(parameters, optimizer, weight=torch.tensor(2.0), lr=1e-3, clip=1.0).done
    before = weights(drafter)
    moments = [{key: value.clone() for key, value in optimizer.state[p].items()} for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    parameters[3].grad.view(-1)[1] = bad
    update = apply_update(parameters, optimizer, weight=torch.tensor(2.0), lr=1e-3, clip=1.0)
    assert not update.done
    assert not update.norm.isfinite()
    assert same(before, weights(drafter))
    assert all(same(moments[i], optimizer.state[p]) for i, p in enumerate(parameters))


def test_case_24_no_weight_at_all_means_no_update() -> None:
    drafter = make_drafter()
    parameters = list(drafter.parameters())
    optimizer = make_optimizer(parameters, TrainConfig(weight_decay=0.5))
    before = weights(drafter)
    update = apply_update(parameters, optimizer, weight=torch.tensor(0.0), lr=1.0, clip=1.0)
    assert (float(update.norm), bool(update.done)) == (0.0, False)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    update = apply_update(parameters, optimizer, weight=torch.tensor(0.0), lr=1.0, clip=1.0)
    assert (float(update.norm), bool(update.done)) == (0.0, False)
    assert same(before, weights(drafter))
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())


def test_weight_decay_is_on_matrices_only() -> None:
    drafter = make_drafter()
    named = dict(drafter.named_parameters())
    optimizer = make_optimizer(named.values(), TrainConfig(weight_decay=0.25))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay.keys() == {id(p) for p in named.values()}
    for name, parameter in named.items():
        assert decay[id(parameter)] == (0.0 if "norm" in name else 0.25), name
    before = weights(drafter)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    assert apply_update(list(named.values()), optimizer, weight=torch.tensor(1.0), lr=0.1, clip=1.0).done
    for name, parameter in named.items():
        factor = 1.0 if "norm" in name else 1 - 0.1 * 0.25
        assert torch.allclose(parameter, before[name] * factor, rtol=1e-6, atol=0), name
    assert set(optimizer.defaults["betas"]) == {0.9, 0.999}


def test_masters_stay_float32_and_gather_updates_below_bf16_resolution() -> None:
    drafter, head = make_drafter(), matrix().bfloat16()
    settings = replace(SETTINGS, dtype=torch.bfloat16)
    parameters = list(drafter.parameters())
    optimizer = make_optimizer(parameters, TrainConfig())
    weight = drafter.get_parameter("layers.0.mlp.up_proj.weight")
    start = weight.detach().clone()
    batch = hidden_batch([4, 4])
    for _ in range(20):
        before = weight.detach().clone()
        sums = micro_step(drafter, batch, embedding=head, head=head, settings=settings)
        assert weight.grad.dtype == torch.float32
        assert apply_update(parameters, optimizer, weight=sums.totals[1], lr=1e-6, clip=1.0).done
        drafter.zero_grad()
        large = before.abs() > 0.05  # bf16 values there are at least 2^-12 apart
        lost = before.bfloat16() + (weight - before).bfloat16() == before.bfloat16()
        assert lost[large].all(), "in bf16 this update would be lost"
    assert all(parameter.dtype == torch.float32 for parameter in parameters)
    assert all(value.dtype == torch.float32 for state in optimizer.state.values() for value in state.values())
    moved = (weight - start).abs()[start.abs() > 0.05]
    assert moved.median() > 5e-6, "updates of 1e-6 must add up"


def test_muon_takes_the_matrices_and_adamw_the_norms() -> None:
    drafter = make_drafter()
    named = dict(drafter.named_parameters())
    optimizer = make_optimizer(named.values(), TrainConfig(optimizer="muon", weight_decay=0.1))
    assert isinstance(optimizer, MuonAndAdamW)
    before = weights(drafter)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    assert apply_update(list(named.values()), optimizer, weight=torch.tensor(1.0), lr=0.01, clip=1.0).done
    for name, parameter in named.items():
        moved = (parameter - before[name]).pow(2).mean().sqrt()
        kinds = set(optimizer.state[parameter])
        if parameter.ndim == 1:
            assert kinds == {"step", "exp_avg", "exp_avg_sq"}
            assert torch.allclose((parameter - before[name]).abs(), torch.tensor(0.01), rtol=1e-3), name
        else:
            assert kinds == {"momentum_buffer"}
            # an orthogonal matrix scaled to the size of AdamW's updates: 0.2 a number (arXiv 2502.16982)
            assert 0.1 * 0.01 < moved < 0.4 * 0.01, name
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}


def test_a_bad_gradient_changes_nothing_under_muon() -> None:
    drafter = make_drafter()
    parameters = list(drafter.parameters())
    optimizer = make_optimizer(parameters, TrainConfig(optimizer="muon"))
    before = weights(drafter)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, torch.nan)
    assert not apply_update(parameters, optimizer, weight=torch.tensor(1.0), lr=0.01, clip=1.0).done
    assert same(before, weights(drafter))
    assert not optimizer.state
