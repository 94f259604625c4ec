"""The kernel of norm and rotary embedding against float64 autograd of the formula, and against the model's modules."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from draftmill.drafter import model
from draftmill.drafter.kernels import rotary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(7, 4, 128), (5, 3, 64), (9, 5, 80), (3, 1, 256), (1, 2, 2)]


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh numbers each time (pytest shows the seed of a failure); small tiles, so that each program takes several."""
    seed = random.randrange(2**31)
    print("seed", seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(rotary, "PROGRAMS", 3)
    monkeypatch.setattr(rotary, "TILE_ELEMENTS", 128)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def weights(size: int) -> Tensor:
    """fp32, but exact in bf16: where a weight is rounded, the interpreter cuts off."""
    return torch.randn(size, device=DEVICE).bfloat16().float()


def table(rows: int, size: int) -> tuple[Tensor, Tensor]:
    """cos and sin [R, D/2] of the model at random positions: slices of its wider rows."""
    positions = torch.randint(0, 4096, (rows,), device=DEVICE)
    cos, sin = model.rotation(positions, size, 1e4, torch.float32)
    return cos[:, 0, : size // 2], sin[:, 0, : size // 2]


def exact_gradients(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, dx, dweight in float64, and the size of dweight's terms. The weight that counts is rounded to x.dtype."""
    x64, w64 = x.detach().double().requires_grad_(), weight.detach().to(x.dtype).double().requires_grad_()
    c, s = cos.double()[:, None], sin.double()[:, None]
    normed = x64 / torch.sqrt((x64 * x64).mean(-1, keepdim=True) + EPS)
    half = x.shape[-1] // 2
    a, b = (normed * w64)[..., :half], (normed * w64)[..., half:]
    y = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
    dx, dw = torch.autograd.grad(y, (x64, w64), dy.double())
    return y.detach(), dx, dw, (normed.detach().abs() * dy.double().norm(dim=-1, keepdim=True)).sum((0, 1))


def close(got: Tensor, exact: Tensor, roundings: int, scale: Tensor | None = None) -> None:
    """Within `roundings` roundings to got's dtype, and fp32 sums of terms of size `scale` (the head's largest number).

    The interpreter cuts off where the GPU rounds to nearest.
    """
    ulp = torch.finfo(got.dtype).eps * (0.5 if DEVICE == "cuda" else 1.0)
    scale = exact.abs().amax(-1, keepdim=True) if scale is None else scale
    allowed = roundings * ulp * 1.01 * exact.abs() + 2e-6 * scale
    excess = ((got.double() - exact).abs() / (allowed + 1e-300)).max()
    assert got.shape == exact.shape
    assert excess <= 1, f"{float(excess):.3g} times the allowed error"  # NaN is not ≤ 1


def gradient_scale(x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    """The size of what is subtracted in dx: with few columns the difference can be much smaller."""
    rms = torch.sqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS)
    return dy.double().abs().amax(-1, keepdim=True) * 2 * weight.double().abs().max() / rms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_and_gradients(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    x, dy, weight = randn(*shape, dtype=dtype).requires_grad_(), randn(*shape, dtype=dtype), weights(shape[-1])
    weight.requires_grad_()
    cos, sin = table(shape[0], shape[-1])
    y = rotary.norm_rotate(x, weight, EPS, cos, sin)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    y64, dx64, dw64, terms = exact_gradients(x, weight, cos, sin, dy)
    assert (y.dtype, dx.dtype, dweight.dtype) == (dtype, dtype, torch.float32)
    close(y, y64, 1)
    close(dx, dx64, 1, scale=gradient_scale(x, weight, dy))
    close(dweight, dw64, 0, scale=terms)


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_the_model_does(dtype: torch.dtype) -> None:
    """The model rounds norm, weight, cos, sin and each product; this kernel once."""
    module = model.RMSNorm(64, EPS).to(DEVICE)
    module.weight.data = randn(64)
    x, positions = randn(9, 3, 64, dtype=dtype), torch.arange(100, 109, device=DEVICE)
    by = model.rotation(positions, 64, 1e4, torch.float32)
    got = rotary.norm_rotate(x, module.weight, EPS, by[0][:, 0, :32], by[1][:, 0, :32])
    expected = model.rotate(module(x), model.rotation(positions, 64, 1e4, dtype)).double()
    close(got, expected, 6, scale=expected.abs().amax(-1, keepdim=True) * (1 if dtype == torch.float32 else 5e3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_tiny_and_huge_heads(dtype: torch.dtype) -> None:
    factors = torch.tensor([0.0, 1e-6, 1.0, 1e6, 1e15], device=DEVICE)
    x, dy, weight = (randn(5, 3, 64) * factors[:, None, None]).to(dtype), randn(5, 3, 64, dtype=dtype), weights(64)
    cos, sin = table(5, 64)
    y = rotary.norm_rotate_forward(x, weight, EPS, cos, sin)
    dx, dweight = rotary.norm_rotate_backward(dy, x, weight, EPS, cos, sin)
    y64, dx64, dw64, terms = exact_gradients(x, weight, cos, sin, dy)
    close(y, y64, 1)
    close(dx, dx64, 1)
    close(dweight, dw64, 0, scale=terms)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_in_and_out(dtype: torch.dtype) -> None:
    """Keys are a slice of a merged projection; they, and their gradient, go into slices of larger tensors."""
    rows, heads, size = 6, 2, 64
    merged, weight = randn(rows, 3 * heads * size, dtype=dtype), weights(size)
    x = merged[:, heads * size : 2 * heads * size].unflatten(-1, (heads, size))
    cos, sin = table(rows, size)
    keys, gradient = randn(rows + 4, heads, size, dtype=dtype), torch.full_like(merged, 7.0)
    out = gradient[:, heads * size : 2 * heads * size].unflatten(-1, (heads, size))
    dy = randn(rows, heads + 1, size, dtype=dtype)[:, 1:]
    before = keys[:4].clone()
    y = rotary.norm_rotate_forward(x, weight, EPS, cos, sin, out=keys[4:])
    dx, _ = rotary.norm_rotate_backward(dy, x, weight, EPS, cos, sin, out=out)
    y64, dx64, _, _ = exact_gradients(x, weight, cos, sin, dy)
    assert y.data_ptr() == keys[4:].data_ptr()
    assert dx.data_ptr() == out.data_ptr()
    close(keys[4:], y64, 1)
    close(out, dx64, 1)
    assert torch.equal(keys[:4], before)
    assert (gradient[:, : heads * size] == 7).all()
    assert (gradient[:, 2 * heads * size :] == 7).all()


def test_gradients_of_any_layout() -> None:
    x, weight = randn(4, 2, 64).requires_grad_(), randn(64)
    cos, sin = table(4, 64)
    y = rotary.norm_rotate(x, weight, EPS, cos, sin)
    for dy in (randn(4, 1, 1).expand(4, 2, 64), randn(2, 4, 64).transpose(0, 1), randn(64, 2, 4).permute(2, 1, 0)):
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        close(dx, exact_gradients(x, weight, cos, sin, dy)[1], 1)


def test_no_rows() -> None:
    x, weight = randn(0, 2, 64).requires_grad_(), randn(64).requires_grad_()
    y = rotary.norm_rotate(x, weight, EPS, *table(0, 64))
    dx, dweight = torch.autograd.grad(y, (x, weight), randn(0, 2, 64))
    assert y.shape == dx.shape == (0, 2, 64)
    assert torch.equal(dweight, torch.zeros(64, device=DEVICE))


def test_same_bits_each_time() -> None:
    x, weight, dy, by = randn(20, 3, 64), randn(64), randn(20, 3, 64), table(20, 64)
    first, second = (rotary.norm_rotate_backward(dy, x, weight, EPS, *by) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_refuses_what_it_cannot_do() -> None:
    weight, (cos, sin) = randn(64), table(4, 64)
    with pytest.raises(ValueError, match="whole rows"):
        rotary.norm_rotate(randn(2, 4, 64).transpose(0, 1), weight, EPS, cos, sin)
    with pytest.raises(ValueError, match="even D"):
        rotary.norm_rotate(randn(4, 2, 63), weight, EPS, cos, sin)
    with pytest.raises(ValueError, match="weight"):
        rotary.norm_rotate(randn(4, 2, 64), randn(128), EPS, cos, sin)
    with pytest.raises(ValueError, match="cos and sin"):
        rotary.norm_rotate(randn(4, 2, 64), weight, EPS, cos.bfloat16(), sin.bfloat16())
    with pytest.raises(ValueError, match="out is"):
        rotary.norm_rotate_forward(randn(4, 2, 64), weight, EPS, cos, sin, out=randn(5, 2, 64))


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    x, weight, dy = randn(1000, 8, 128, dtype=torch.bfloat16), randn(128), randn(1000, 8, 128, dtype=torch.bfloat16)
    cos, sin = table(1000, 128)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        y = rotary.norm_rotate_forward(x, weight, EPS, cos, sin)
        return y, *rotary.norm_rotate_backward(dy, x, weight, EPS, cos, sin)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(randn(1000, 8, 128))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu
def test_sizes_of_a_real_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x, dy = (randn(3001, 32 * 128 + 256, dtype=torch.bfloat16)[:, :4096].unflatten(-1, (32, 128)) for _ in range(2))
    weight, (cos, sin) = weights(128), table(3001, 128)
    y = rotary.norm_rotate_forward(x, weight, EPS, cos, sin)
    dx, dweight = rotary.norm_rotate_backward(dy, x, weight, EPS, cos, sin)
    y64, dx64, dw64, terms = exact_gradients(x, weight, cos, sin, dy)
    close(y, y64, 1)
    close(dx, dx64, 1)
    close(dweight, dw64, 0, scale=terms)
