"""The memory estimate against a count of its own, and the matrices of a fused step against the drafter's parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftmill.drafter.config import FULL, SLIDING, DrafterSpec
from draftmill.drafter.memory import HEADROOM, checkpoint_bytes, estimate, fewest_groups, parameters
from draftmill.drafter.model import Drafter, initialise
from draftmill.drafter.weights import ComputeWeights, add_product
from draftmill.train.checkpoint import optimizer_tensors
from draftmill.train.config import TrainConfig
from draftmill.train.optim import make_optimizer

SPEC = DrafterSpec(
    hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=2, head_dim=10, rms_norm_eps=1e-6,
    rope_theta=10000.0, block_size=4, mask_token_id=99, taps=(0, 2, 3), layer_types=(SLIDING, FULL),
    layer_causal=(True, False), sliding_window=9, vocab_size=101, num_target_layers=4, max_position_embeddings=128,
)  # fmt: skip
SIZES = {"context_rows": 4096, "anchors": 512, "groups": 1, "tied": False}


def test_parameters_are_those_of_the_network() -> None:
    for spec in (SPEC, replace(SPEC, layer_types=(FULL,) * 5, layer_causal=(False,) * 5, taps=(1,))):
        assert parameters(spec) == sum(p.numel() for p in Drafter(spec).parameters())


def test_weights_of_the_27b_shape() -> None:
    spec = replace(
        SPEC, hidden_size=5120, intermediate_size=17408, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        taps=(1, 16, 31, 46, 61), layer_types=(FULL,) * 5, layer_causal=(False,) * 5, vocab_size=248320, block_size=16,
    )  # fmt: skip
    memory = estimate(spec, **SIZES)
    assert memory.weights == pytest.approx(18 * 1.73e9, rel=1e-3)
    assert memory.matrices == 2 * 2 * 248320 * 5120
    assert memory.features == 4096 * 5 * 5120 * 2  # no graph at this size
    # 8,192 draft tokens, in bf16: gate and up of five layers alone
    assert memory.blocks > 8192 * 2 * 17408 * 5 * 2
    assert "weights 31.1" in memory.describe()


def test_groups_divide_what_belongs_to_blocks_and_nothing_else() -> None:
    one, four = estimate(SPEC, **SIZES), estimate(SPEC, **{**SIZES, "groups": 4})
    assert (one.weights, one.matrices, one.features, one.context) == (
        four.weights, four.matrices, four.features, four.context
    )  # fmt: skip
    assert 0.2 < four.blocks / one.blocks < 0.4
    assert four.total < one.total


def test_a_tied_head_counts_once() -> None:
    assert 2 * estimate(SPEC, **{**SIZES, "tied": True}).matrices == estimate(SPEC, **SIZES).matrices


def test_fp8_has_two_copies_of_the_head_and_the_same_weights() -> None:
    plain, head, both = (estimate(SPEC, **SIZES, fp8=use) for use in ("none", "head", "all"))
    assert head.matrices == both.matrices == plain.matrices + 2 * 101 * 48
    assert plain.weights == head.weights == both.weights
    assert plain.blocks <= head.blocks <= both.blocks
    assert plain.context == both.context
    assert fewest_groups(SPEC, head.total / HEADROOM - 1, context_rows=4096, anchors=512, tied=False)[0] == 1
    assert (
        fewest_groups(SPEC, head.total / HEADROOM - 1, context_rows=4096, anchors=512, tied=False, fp8="head")[0] != 1
    )


def test_a_graph_has_a_copy_of_the_features() -> None:
    """SPEC is small enough for one."""
    with_graph, without = estimate(SPEC, **SIZES), estimate(SPEC, **SIZES, graph=False)
    assert with_graph.features == 2 * without.features == 2 * 4096 * 3 * 48 * 2


def test_as_few_groups_as_fit_and_none_where_nothing_does() -> None:
    sizes = {"context_rows": 4096, "anchors": 6, "tied": False}
    need = {groups: estimate(SPEC, groups=groups, **sizes).total for groups in (1, 2, 4)}
    assert need[4] < need[2] < need[1]
    for groups, total in need.items():
        assert fewest_groups(SPEC, total / HEADROOM + 1, **sizes) == (groups, estimate(SPEC, groups=groups, **sizes))
    assert fewest_groups(SPEC, need[4] / HEADROOM - 1, **sizes) == (None, estimate(SPEC, groups=4, **sizes))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_is_as_large_as_what_is_saved(optimizer: str) -> None:
    drafter = Drafter(SPEC)
    parameters_ = list(drafter.parameters())
    for parameter in parameters_:
        parameter.grad = torch.ones_like(parameter)
    trained = make_optimizer(parameters_, TrainConfig(optimizer=optimizer))
    trained.step()
    counts = sum(1 for state in trained.state.values() if "step" in state)  # a number each, not counted
    saved = sum(t.nbytes for t in (*drafter.state_dict().values(), *optimizer_tensors(trained).values()))
    assert checkpoint_bytes(SPEC, optimizer) == saved - 4 * counts


def make(seed: int = 0) -> tuple[Drafter, ComputeWeights]:
    drafter = Drafter(SPEC)
    initialise(drafter, seed, std=0.3)
    return drafter, ComputeWeights(drafter, torch.bfloat16)


def test_matrices_of_the_same_rows_lie_side_by_side() -> None:
    drafter, weights = make()
    for number, layer in enumerate(weights.layers):
        attention, mlp = drafter.layers[number].self_attn, drafter.layers[number].mlp
        joined = torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
        assert torch.equal(layer.qkv.value, joined.bfloat16())
        assert torch.equal(layer.gate_up.value, torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).bfloat16())
        assert torch.equal(layer.out.value, attention.o_proj.weight.bfloat16())
        assert torch.equal(layer.down.value, mlp.down_proj.weight.bfloat16())
    assert torch.equal(weights.fc.value, drafter.fc.weight.bfloat16())


def test_every_parameter_has_a_gradient_and_those_of_matrices_grow_where_products_write() -> None:
    drafter, weights = make()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in drafter.parameters())
    grad, rows = torch.randn(7, weights.layers[0].qkv.value.shape[0]), torch.randn(7, 48)
    weights.layers[0].qkv.outputs(60).add_gradient(grad[:, 60:].bfloat16(), rows.bfloat16())
    attention = drafter.layers[0].self_attn
    wanted = grad.bfloat16().float().T @ rows.bfloat16().float()
    assert not attention.q_proj.weight.grad.any()
    assert torch.allclose(attention.k_proj.weight.grad, wanted[60:80], rtol=1e-5, atol=1e-5)
    assert torch.allclose(attention.v_proj.weight.grad, wanted[80:], rtol=1e-5, atol=1e-5)
    weights.clear_gradients()
    assert all(not p.grad.any() for p in drafter.parameters())


def test_copies_follow_their_masters_when_told() -> None:
    drafter, weights = make()
    drafter.layers[1].mlp.up_proj.weight.data.add_(1.0)
    weights.refresh()
    assert torch.equal(weights.layers[1].gate_up.value[80:], drafter.layers[1].mlp.up_proj.weight.bfloat16())


def test_kept_gradients_come_back() -> None:
    drafter, weights = make()
    for parameter in drafter.parameters():
        parameter.grad.normal_()
    before = [p.grad.clone() for p in drafter.parameters()]
    kept = weights.keep_gradients()
    weights.clear_gradients()
    weights.restore_gradients(kept)
    assert all(torch.equal(p.grad, old) for p, old in zip(drafter.parameters(), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_add_up_in_float32(dtype: torch.dtype) -> None:
    into = torch.full((5, 6), 1000.0)
    left, right = torch.full((5, 3), 0.01, dtype=dtype), torch.full((3, 6), 0.01, dtype=dtype)
    for _ in range(10):
        add_product(into, left, right)
    exact = 1000.0 + 10 * 3 * float(left[0, 0]) * float(right[0, 0])
    assert torch.allclose(into, torch.full((5, 6), exact), rtol=0, atol=2e-3)
    assert into[0, 0] > 1000.0, "in bfloat16 this would be lost"
