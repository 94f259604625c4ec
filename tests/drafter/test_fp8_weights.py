"""The drafter's matrices in fp8: rounding exactly that of torch, products against float64, the gradients of a whole
step against those without fp8. Training in fp8 is compared in tests/gpu/test_gpu_fused.py; interpreted, it takes long.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from fp8_emulation import emulate

from draftmill.drafter.config import FULL, SLIDING, DrafterSpec
from draftmill.drafter.fp8 import RowScaled
from draftmill.drafter.kernels import quantise
from draftmill.drafter.kernels.quantise import E4M3, round_rows
from draftmill.drafter.memory import Fp8Use
from draftmill.drafter.model import Drafter, initialise
from draftmill.drafter.weights import ComputeWeights, Fp8Weight
from draftmill.records import HiddenBatch, TokenBatch
from draftmill.train.fused_step import FusedStep
from draftmill.train.step import StepSettings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_FP8 = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not HAS_FP8, reason="needs fp8 tensor cores")
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter cannot multiply bfloat16

SPEC = DrafterSpec(
    hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1, head_dim=64, rms_norm_eps=1e-6,
    rope_theta=10000.0, block_size=4, mask_token_id=99, taps=(0, 2), layer_types=(SLIDING, FULL),
    layer_causal=(True, False), sliding_window=9, vocab_size=112, num_target_layers=4, max_position_embeddings=128,
)  # fmt: skip
TOKENS, DOCUMENT = 32, 16


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if DEVICE == "cpu":
        emulate(monkeypatch)


def exact(matrix: RowScaled) -> Tensor:
    return matrix.values.double() * matrix.scales.double()[:, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [16, 576, 304])
def test_rows_are_rounded_as_torch_rounds(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step and in several, the last of them not full; rows of a wider matrix."""
    monkeypatch.setattr(quantise, "BLOCK", 128)
    wide = (torch.randn(20, size + 16) * torch.logspace(-20, 20, 20)[:, None]).to(dtype).to(DEVICE)
    wide[3, :size] = 0.0
    rows = wide[:, :size]
    values, scales = round_rows(rows)
    want = (rows.float().abs().amax(1) / 448).clamp_min(2.0**-100)
    torch.testing.assert_close(scales, want, rtol=1e-6, atol=0.0)
    wanted = (rows.float() * (1.0 / scales)[:, None]).to(E4M3)
    assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
    assert not values[3].float().any()
    assert values.is_contiguous()


def test_what_is_no_number_makes_its_row_nan_and_no_other() -> None:
    rows = torch.randn(4, 64, device=DEVICE)
    rows[1, 5], rows[2, 5] = torch.nan, -torch.inf
    got = exact(RowScaled(*round_rows(rows)))
    assert got.sum(1).isnan().tolist() == [False, True, True, False]


def make(seed: int = 0) -> tuple[Drafter, ComputeWeights]:
    drafter = Drafter(SPEC)
    initialise(drafter, seed, std=0.3)
    drafter = drafter.to(DEVICE)
    return drafter, ComputeWeights(drafter, DTYPE, fp8=True)


def check_rounded(weight: Fp8Weight, want: Tensor) -> None:
    for got, matrix in ((weight.by_output, want.double()), (weight.by_input, want.double().T)):
        torch.testing.assert_close(got.scales.double(), matrix.abs().amax(1) / 448, rtol=1e-6, atol=0.0)
        bound = torch.maximum(matrix.abs() * 2.0**-4, got.scales.double()[:, None] * 2.0**-10)
        assert bool(((exact(got) - matrix).abs() <= bound * (1 + 1e-5)).all())


def test_both_copies_are_the_masters_and_follow_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles each way, masters stacked by outputs."""
    monkeypatch.setattr(quantise, "TILE_ROWS", 32)
    monkeypatch.setattr(quantise, "TILE_COLUMNS", 32)
    drafter, weights = make()
    for _ in range(2):
        for number, own in enumerate(weights.layers):
            attention, mlp = drafter.layers[number].self_attn, drafter.layers[number].mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            check_rounded(own.qkv, torch.cat([p.weight.detach() for p in projections]))
            check_rounded(own.out, attention.o_proj.weight.detach())
            check_rounded(own.gate_up, torch.cat((mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach())))
            check_rounded(own.down, mlp.down_proj.weight.detach())
        check_rounded(weights.fc, drafter.fc.weight.detach())
        for parameter in drafter.parameters():
            parameter.data.mul_(torch.rand_like(parameter))
        weights.refresh()


def test_a_master_with_a_nan_makes_nan_and_does_not_pass() -> None:
    drafter, weights = make()
    drafter.layers[0].mlp.down_proj.weight.data[5, 7] = torch.nan
    weights.refresh()
    down = weights.layers[0].down
    assert bool(down.product(torch.randn(3, 96, device=DEVICE, dtype=DTYPE))[:, 5].isnan().all())
    assert bool(down.input_gradient(torch.randn(3, 64, device=DEVICE, dtype=DTYPE))[:, 7].isnan().all())


def near(got: Tensor, want: Tensor, relative: float) -> None:
    """In the norm and in direction; NaN never passes."""
    got, want = got.double().flatten(), want.double().flatten()
    error = float((got - want).norm() / want.norm())
    print(f"error {error:.4f}")
    assert error < relative
    assert float(torch.cosine_similarity(got, want, dim=0)) > 1 - relative**2


@pytest.mark.parametrize("start", [0, 128])
def test_products_are_near_float64(start: int) -> None:
    """Whole and in part; the gradient of the weights is the same as without fp8."""
    drafter, weights = make()
    attention = drafter.layers[0].self_attn
    want = torch.cat([p.weight.detach() for p in (attention.q_proj, attention.k_proj, attention.v_proj)])[start:]
    part = weights.layers[0].qkv.outputs(start)
    # Rows and entries of very different sizes, as gradients have them.
    rows = (torch.randn(33, 64) * torch.logspace(-6, 3, 33)[:, None]).to(DEVICE, DTYPE)
    grad = (torch.randn(33, len(want)) * torch.exp(torch.randn(33, len(want)) * 2)).to(DEVICE, DTYPE)
    for got, wanted in (
        (part.product(rows), rows.double() @ want.double().T),
        (part.input_gradient(grad), grad.double() @ want.double()),
    ):
        near(got, wanted, 0.05)
        for own, one in zip(got, wanted, strict=True):  # small rows as exactly as large ones
            near(own, one, 0.12)
    into = torch.ones(33, 64, device=DEVICE, dtype=DTYPE)
    part.add_input_gradient(grad, into)
    torch.testing.assert_close(into, 1 + part.input_gradient(grad), rtol=1e-2, atol=1e-2)
    part.add_gradient(grad, rows)
    near(part.gradient, grad.double().T @ rows.double(), 1e-5)


def make_batch(number: int) -> HiddenBatch:
    """Text that counts upwards in steps of 3, and features that say where it stands."""
    place = torch.arange(TOKENS, dtype=torch.int32)
    ids = (place % DOCUMENT * 3 + place // DOCUMENT * 7 + number * 11) % 97
    table = torch.randn(112, 2 * SPEC.hidden_size, generator=torch.Generator().manual_seed(2))
    tokens = TokenBatch(
        ids.int(), torch.ones(TOKENS, dtype=torch.bool), place % DOCUMENT, place // DOCUMENT,
        tuple(range(TOKENS // DOCUMENT)), number, number, 0,
    )  # fmt: skip
    return HiddenBatch(tokens, table[ids.long()].to(DEVICE, DTYPE), "cafe", SPEC.taps)


def make_step(fp8: Fp8Use) -> tuple[Drafter, FusedStep]:
    drafter = Drafter(SPEC)
    initialise(drafter, 1)
    drafter = drafter.to(DEVICE)
    table = torch.randn(112, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE, DTYPE) * 0.3
    settings = StepSettings(anchors=8, gamma=4.0, seed=3, dtype=DTYPE, fused_rows=TOKENS, fp8=fp8)
    return drafter, FusedStep(drafter, table, table, settings, groups=1, graph=False)


def test_gradients_of_a_whole_step_point_the_same_way() -> None:
    found = {}
    uses: tuple[Fp8Use, ...] = ("none", "head", "all")
    for use in uses:
        drafter, step = make_step(use)
        sums = step(make_batch(0))
        found[use] = sums.totals, {name: p.grad for name, p in drafter.named_parameters()}
        assert ("fp8" in step.describe()) == (use != "none")
    for use, bound in (("head", 0.2), ("all", 0.3)):  # of a few rows that nearly cancel
        torch.testing.assert_close(found[use][0], found["none"][0], rtol=2e-2, atol=0.0)
        for name, want in found["none"][1].items():
            print(use, name, end=" ")
            near(found[use][1][name], want, bound)
