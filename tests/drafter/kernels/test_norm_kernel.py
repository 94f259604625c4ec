"""The norm kernels against float64 autograd of the formula, and against the model's own module."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from draftmill.drafter.kernels import norm
from draftmill.drafter.model import RMSNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh numbers each time (pytest shows the seed of a failure); few programs, so that each takes several rows."""
    seed = random.randrange(2**31)
    print("seed", seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(norm, "BACKWARD_WARPS", 6)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def weights(size: int) -> Tensor:
    """fp32, but exact in bf16: where a weight is rounded, the interpreter cuts off."""
    return torch.randn(size, device=DEVICE).bfloat16().float()


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def exact_gradients(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dweight in float64. The weight that counts is the one rounded to x.dtype."""
    x64, w64 = x.detach().double().requires_grad_(), weight.detach().to(x.dtype).double().requires_grad_()
    y = exact_norm(x64, w64)
    return y.detach(), *torch.autograd.grad(y, (x64, w64), dy.double())


def close(got: Tensor, exact: Tensor, roundings: int, scale: Tensor | None = None) -> None:
    """Within `roundings` roundings to got's dtype, and fp32 sums of terms of size `scale` (the row's largest number).

    The interpreter cuts off where the GPU rounds to nearest.
    """
    ulp = torch.finfo(got.dtype).eps * (0.5 if DEVICE == "cuda" else 1.0)
    scale = exact.abs().amax(-1, keepdim=True) if scale is None else scale
    allowed = roundings * ulp * 1.01 * exact.abs() + 2e-6 * scale
    excess = ((got.double() - exact).abs() / (allowed + 1e-300)).max()
    assert got.shape == exact.shape
    assert excess <= 1, f"{excess.item():.3g} times the allowed error"  # NaN is not ≤ 1


def column_sums(x: Tensor, dy: Tensor) -> Tensor:
    """The size of the terms of dweight."""
    ones = torch.ones(x.shape[1], device=DEVICE, dtype=torch.float64)
    return (dy.double() * exact_norm(x.double(), ones)).abs().sum(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(7, 576), (1, 64), (13, 100), (5, 1)])
def test_norm_and_gradients(dtype: torch.dtype, rows: int, size: int) -> None:
    x, weight, dy = randn(rows, size, dtype=dtype).requires_grad_(), weights(size).requires_grad_(), randn(rows, size)
    y = norm.rms_norm(x, weight, EPS)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy.to(dtype))
    y64, dx64, dw64 = exact_gradients(x, weight, dy.to(dtype))
    assert (y.dtype, dx.dtype, dweight.dtype) == (dtype, dtype, torch.float32)
    close(y, y64, 2)
    # With one column dx is a difference of nearly equal numbers: the size of what is subtracted counts
    close(dx, dx64, 1, scale=(dy.double() * weight / x.double().pow(2).mean(-1, True).sqrt()).abs().amax(-1, True))
    close(dweight, dw64, 0, scale=column_sums(x.detach(), dy.to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_row(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "BACKWARD_WARPS", 16)
    x, weight, dy = randn(2, 5120, dtype=dtype), weights(5120), randn(2, 5120, dtype=dtype)
    y, rstd = norm.rms_norm_forward(x, weight, EPS)
    dx, dweight = norm.rms_norm_backward(dy, x, weight, rstd)
    y64, dx64, dw64 = exact_gradients(x, weight, dy)
    close(y, y64, 2)
    close(dx, dx64, 1)
    close(dweight, dw64, 0, scale=column_sums(x, dy))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_tiny_and_huge_rows(dtype: torch.dtype) -> None:
    factors = torch.tensor([0.0, 1e-6, 1e-3, 1.0, 1e6, 1e15], device=DEVICE)
    x, weight, dy = (randn(6, 200) * factors[:, None]).to(dtype), weights(200), randn(6, 200, dtype=dtype)
    y, rstd = norm.rms_norm_forward(x, weight, EPS)
    dx, dweight = norm.rms_norm_backward(dy, x, weight, rstd)
    y64, dx64, dw64 = exact_gradients(x, weight, dy)
    close(y, y64, 2)
    close(dx, dx64, 1)
    close(dweight, dw64, 0, scale=column_sums(x, dy))


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_the_model_does(dtype: torch.dtype) -> None:
    module = RMSNorm(576, EPS).to(DEVICE)
    module.weight.data = randn(576)
    x = randn(9, 576, dtype=dtype)
    close(
        norm.rms_norm(x, module.weight, EPS), module(x).double(), 4
    )  # each of them rounds x and weight, or cuts them off


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_and_gradients(dtype: torch.dtype) -> None:
    x, delta, dsum, dy = (randn(7, 576, dtype=dtype) for _ in range(4))
    weight = weights(576).requires_grad_()
    x.requires_grad_()
    delta.requires_grad_()
    total, y = norm.add_rms_norm(x, delta, weight, EPS)
    dx, ddelta, dweight = torch.autograd.grad((total, y), (x, delta, weight), (dsum, dy))
    close(total, x.double() + delta.double(), 1)
    y64, dx64, dw64 = exact_gradients(total, weight, dy)  # what is normed is the rounded sum
    close(y, y64, 2)
    close(dx, dx64 + dsum.double(), 1)
    assert torch.equal(dx, ddelta)
    close(dweight, dw64, 0, scale=column_sums(total.detach(), dy))


def test_one_output_unused() -> None:
    x, delta, weight = randn(5, 64).requires_grad_(), randn(5, 64).requires_grad_(), randn(64).requires_grad_()
    dy = randn(5, 64)
    total, y = norm.add_rms_norm(x, delta, weight, EPS)
    dx, ddelta = torch.autograd.grad(y, (x, delta), dy, retain_graph=True)
    close(dx, exact_gradients(total, weight, dy)[1], 1)
    assert torch.equal(dx, ddelta)
    dx, ddelta, dweight = torch.autograd.grad(total, (x, delta, weight), dy, allow_unused=True)
    assert torch.equal(dx, dy)
    assert torch.equal(ddelta, dy)
    assert dweight is None


def test_strided_rows_and_gradients() -> None:
    wide = randn(6, 300)
    x, delta, weight = wide[:, 20:120].requires_grad_(), wide[:, 150:250].requires_grad_(), randn(100)
    total, y = norm.add_rms_norm(x, delta, weight, EPS)
    expanded, transposed, sliced = randn(6, 1).expand(6, 100), randn(100, 6).T, randn(6, 130)[:, 30:]
    for dsum, dy in ((expanded, transposed), (sliced, expanded), (transposed, sliced)):
        (dx,) = torch.autograd.grad((total, y), x, (dsum, dy), retain_graph=True)
        close(dx, exact_gradients(total, weight, dy)[1] + dsum.double(), 1)
    close(total, x.double() + delta.double(), 1)


def test_weight_in_bf16() -> None:
    x, weight, dy = randn(5, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16), randn(5, 64).bfloat16()
    weight.requires_grad_()
    y = norm.rms_norm(x, weight, EPS)
    (dweight,) = torch.autograd.grad(y, weight, dy)
    y64, _, dw64 = exact_gradients(x, weight, dy)
    close(y, y64, 2)
    assert dweight.dtype == torch.bfloat16
    close(dweight, dw64, 1, scale=column_sums(x, dy))


def test_no_rows() -> None:
    x, weight = randn(0, 64).requires_grad_(), randn(64).requires_grad_()
    total, y = norm.add_rms_norm(x, x, weight, EPS)
    dx, dweight = torch.autograd.grad((total, y), (x, weight), (randn(0, 64), randn(0, 64)))
    assert y.shape == dx.shape == (0, 64)
    assert torch.equal(dweight, torch.zeros(64, device=DEVICE))


def test_same_bits_each_time() -> None:
    x, weight, dy = randn(20, 100), randn(100), randn(20, 100)
    _, rstd = norm.rms_norm_forward(x, weight, EPS)
    first, second = (norm.rms_norm_backward(dy, x, weight, rstd) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="contiguous rows"):
        norm.rms_norm(randn(64, 4).T, randn(64), EPS)
    with pytest.raises(ValueError, match="8192"):
        norm.rms_norm(randn(1, 8193), randn(8193), EPS)
    with pytest.raises(ValueError, match="weight"):
        norm.rms_norm(randn(4, 64), randn(63), EPS)
    with pytest.raises(ValueError, match="delta"):
        norm.add_rms_norm(randn(4, 64), randn(3, 64), randn(64), EPS)


@pytest.mark.gpu
def test_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x, weight, dy = randn(1000, 5120, dtype=torch.bfloat16), randn(5120), randn(1000, 5120, dtype=torch.bfloat16)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        y, rstd = norm.rms_norm_forward(x, weight, EPS)
        return y, *norm.rms_norm_backward(dy, x, weight, rstd)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(randn(1000, 5120))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu
def test_more_numbers_than_32_bits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rows = 2**31 // 5120 + 100
    x, weight = torch.zeros(rows, 5120, dtype=torch.bfloat16, device=DEVICE), randn(5120)
    x[-50:] = randn(50, 5120)
    y, rstd = norm.rms_norm_forward(x, weight, EPS)
    dx, _ = norm.rms_norm_backward(x, x, weight, rstd)
    y64, dx64, _ = exact_gradients(x[-50:], weight, x[-50:])
    close(y[-50:], y64, 2)
    close(dx[-50:], dx64, 1)
    assert not y[:-50].any()
