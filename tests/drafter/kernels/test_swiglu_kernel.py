"""The SwiGLU kernel against float64 autograd of the formula."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from draftmill.drafter.kernels import swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(7, 100), (1, 64), (5, 1), (3, 1536), (11, 17)]  # R, F


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Fresh numbers each time; pytest shows the seed of a failure."""
    seed = random.randrange(2**31)
    print("seed", seed)
    torch.manual_seed(seed)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def exact_gradients(gate_up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """y and the gradient of gate_up in float64."""
    wide = gate_up.detach().double().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    y = gate * torch.sigmoid(gate) * up
    (gradient,) = torch.autograd.grad(y, wide, dy.double())
    return y.detach(), gradient


def close(got: Tensor, exact: Tensor, scale: Tensor | float = 0.0) -> None:
    """Within one rounding to got's dtype (the interpreter cuts off, the GPU rounds) and 1e-5: exp(30) errs by 3e-6.

    scale: what the result was multiplied from, where it is itself a difference of larger numbers.
    """
    ulp = torch.finfo(got.dtype).eps * (0.5 if DEVICE == "cuda" else 1.0)
    allowed = (ulp * 1.01 + 1e-5) * exact.abs() + 2e-6 * scale + 1e-34  # where the sigmoid underflows
    excess = ((got.double() - exact).abs() / allowed).max()
    assert got.shape == exact.shape
    assert excess <= 1, f"{float(excess):.3g} times the allowed error"  # NaN is not ≤ 1


def near_turn(gate_up: Tensor, dy: Tensor) -> Tensor:
    """silu has a minimum at −1.28: near it the gate's gradient is small against dy · up."""
    up = gate_up.double().chunk(2, dim=-1)[1]
    return torch.cat(((dy * up).abs(), torch.zeros_like(up)), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_product_and_gradient(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    rows, size = shape
    gate_up, dy = randn(rows, 2 * size, dtype=dtype).requires_grad_(), randn(rows, size, dtype=dtype)
    y = swiglu.swiglu(gate_up)
    (gradient,) = torch.autograd.grad(y, gate_up, dy)
    y64, exact = exact_gradients(gate_up, dy)
    assert y.dtype == gradient.dtype == dtype
    close(y, y64)
    close(gradient, exact, near_turn(gate_up.detach(), dy))


def test_as_the_model_does() -> None:
    gate_up = randn(5, 128)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(swiglu.swiglu(gate_up), F.silu(gate) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("over_gradient", [False, True])
def test_gradient_and_product_again(dtype: torch.dtype, in_place: bool, over_gradient: bool) -> None:
    """The product may take the place of its gradient, and the gradient that of gate_up."""
    gate_up, dy = randn(7, 3000, dtype=dtype), randn(7, 1500, dtype=dtype)
    y64, exact = exact_gradients(gate_up, dy)
    kept, scale, forward = gate_up.clone(), near_turn(gate_up, dy), swiglu.swiglu_forward(gate_up)
    gradient, y = swiglu.swiglu_backward(gate_up, dy, in_place, out=dy if over_gradient else None)
    close(gradient, exact, scale)
    close(y, y64)
    assert torch.equal(y, forward)
    assert (gradient is gate_up) == in_place
    assert (y is dy) == over_gradient
    assert in_place or torch.equal(gate_up, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_and_large_values(dtype: torch.dtype) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-20, 30.0, -30.0, 90.0, -90.0, 1e4, -1e4, 1e30, -1e30], device=DEVICE)
    gate_up = torch.stack((gate, torch.full_like(gate, 3.0)), dim=1).to(dtype)
    dy = randn(len(gate), 1, dtype=dtype)
    y64, exact = exact_gradients(gate_up, dy)
    gradient, y = swiglu.swiglu_backward(gate_up, dy, False)
    close(y, y64)
    close(gradient, exact, near_turn(gate_up, dy))
    close(swiglu.swiglu_forward(gate_up), y64)
    assert not swiglu.swiglu(torch.zeros_like(gate_up)).any()


def test_strided_rows_and_gradients() -> None:
    wide, out = randn(6, 300), torch.full((6, 120), 7.0, device=DEVICE)
    gate_up = wide[:, 30:230].requires_grad_()
    y = swiglu.swiglu(gate_up)
    for dy in (randn(6, 1).expand(6, 100), randn(100, 6).T, randn(6, 150)[:, 50:]):
        (gradient,) = torch.autograd.grad(y, gate_up, dy, retain_graph=True)
        close(gradient, exact_gradients(gate_up, dy)[1], near_turn(gate_up.detach(), dy))
    swiglu.swiglu_forward(gate_up.detach(), out=out[:, 10:110])
    assert torch.equal(out[:, 10:110], y)
    assert (out[:, :10] == 7).all()
    assert (out[:, 110:] == 7).all()


def test_no_rows() -> None:
    gate_up = randn(0, 128).requires_grad_()
    y = swiglu.swiglu(gate_up)
    (gradient,) = torch.autograd.grad(y, gate_up, randn(0, 64))
    assert y.shape == (0, 64)
    assert gradient.shape == (0, 128)


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="contiguous rows"):
        swiglu.swiglu(randn(64, 4).T)
    with pytest.raises(ValueError, match="contiguous rows"):
        swiglu.swiglu(randn(4, 63))
    with pytest.raises(ValueError, match="out is"):
        swiglu.swiglu_forward(randn(4, 64), out=randn(4, 64))
    with pytest.raises(ValueError, match="gradient"):
        swiglu.swiglu_backward(randn(4, 64), randn(4, 64), False)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    gate_up, dy = randn(1000, 2 * 17408, dtype=torch.bfloat16), randn(1000, 17408, dtype=torch.bfloat16)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        return swiglu.swiglu_forward(gate_up), *swiglu.swiglu_backward(gate_up, dy, False)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    gate_up.copy_(randn(1000, 2 * 17408))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu
def test_more_numbers_than_32_bits_count() -> None:
    rows = 2**31 // 34816 + 100
    gate_up = torch.zeros(rows, 34816, dtype=torch.bfloat16, device=DEVICE)
    dy = torch.ones(rows, 17408, dtype=torch.bfloat16, device=DEVICE)
    gate_up[-50:] = randn(50, 34816)
    y64, exact = exact_gradients(gate_up[-50:], dy[-50:])
    scale = near_turn(gate_up[-50:], dy[-50:])
    gradient, y = swiglu.swiglu_backward(gate_up, dy, True)
    close(y[-50:], y64)
    close(gradient[-50:], exact, scale)
    assert not y[:-50].any()
