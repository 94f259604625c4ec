"""Per-head root-mean-square norm and rotary embedding of queries or keys, in one pass over a projection's output.

`model.rotate(model.RMSNorm(x))`. The weight is rounded to x.dtype as there; the rest is fp32 and rounded once, at the
end. The plain functions serve callers with an autograd Function of their own; their `out` may be a slice of a larger
tensor, so that neither keys of context and block nor gradients of a merged projection need a copy to come together.

Legend: R rows, heads, D head size. A tensor [R, heads, D] may have any row stride, so it may be a slice of wider rows.
cos, sin [R, D/2] fp32: the first half of `model.rotation(positions, D, theta, torch.float32)`, whose halves are equal.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

PROGRAMS = (
    1056  # of the backward pass, 8 for each multiprocessor of an H200: each sums the weight gradient of its heads
)
STAGES = 1
TILE_ELEMENTS = 1024  # of one half, in 4 warps: one 16-byte access of bf16 for each thread


@triton.jit  # type: ignore[untyped-decorator]
def _halves(start: tl.tensor, column: tl.tensor, half: tl.constexpr, mask: tl.tensor) -> tl.tensor:
    """Both halves of heads that start at `start` [tile], as [tile, block] fp32."""
    at = start[:, None] + column[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def _store_halves(
    start: tl.tensor, column: tl.tensor, half: tl.constexpr, mask: tl.tensor, first: tl.tensor, second: tl.tensor
) -> None:
    at = start[:, None] + column[None, :]
    tl.store(at, first.to(start.dtype.element_ty), mask=mask)
    tl.store(at + half, second.to(start.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(weight: tl.tensor, like: tl.tensor, column: tl.tensor, half: tl.constexpr) -> tl.tensor:
    """Both halves of the weight as [1, block] fp32, rounded to the element type of `like`."""
    first = tl.load(weight + column, mask=column < half, other=0.0).to(like.dtype.element_ty).to(tl.float32)
    second = tl.load(weight + half + column, mask=column < half, other=0.0).to(like.dtype.element_ty).to(tl.float32)
    return first[None, :], second[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    y: tl.tensor,
    total: tl.tensor,
    x_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    y_stride: tl.tensor,
    eps: tl.tensor,
    heads: tl.constexpr,
    half: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
) -> None:
    number = tl.program_id(0) * tile + tl.arange(0, tile)  # of the head, over all rows
    row = (number // heads).to(tl.int64)
    head = number % heads
    column = tl.arange(0, block)
    mask = (number < total)[:, None] & (column < half)[None, :]
    first, second = _halves(x + row * x_stride + head * (2 * half), column, half, mask)
    w_first, w_second = _weights(weight, x, column, half)
    c = tl.load((cos + row * cos_stride)[:, None] + column[None, :], mask=mask, other=0.0)
    s = tl.load((sin + row * sin_stride)[:, None] + column[None, :], mask=mask, other=0.0)
    rstd = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * half) + eps)[:, None]
    first = first * rstd * w_first
    second = second * rstd * w_second
    to = y + row * y_stride + head * (2 * half)
    _store_halves(to, column, half, mask, first * c - second * s, second * c + first * s)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(
    dy: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    dx: tl.tensor,
    partial: tl.tensor,
    total: tl.tensor,
    dy_stride: tl.tensor,
    x_stride: tl.tensor,
    cos_stride: tl.tensor,
    sin_stride: tl.tensor,
    dx_stride: tl.tensor,
    eps: tl.tensor,
    heads: tl.constexpr,
    half: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    steps: tl.constexpr,  # a constant: the interpreter cannot loop to anything else
    stages: tl.constexpr,
) -> None:
    column = tl.arange(0, block)
    w_first, w_second = _weights(weight, x, column, half)
    dw_first = tl.zeros([tile, block], dtype=tl.float32)
    dw_second = tl.zeros([tile, block], dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=stages):
        number = (tl.program_id(0) + step * tl.num_programs(0)) * tile + tl.arange(0, tile)
        row = (number // heads).to(tl.int64)
        head = number % heads
        mask = (number < total)[:, None] & (column < half)[None, :]
        first, second = _halves(x + row * x_stride + head * (2 * half), column, half, mask)
        dy_first, dy_second = _halves(dy + row * dy_stride + head * (2 * half), column, half, mask)
        c = tl.load((cos + row * cos_stride)[:, None] + column[None, :], mask=mask, other=0.0)
        s = tl.load((sin + row * sin_stride)[:, None] + column[None, :], mask=mask, other=0.0)
        rstd = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * half) + eps)[:, None]
        first *= rstd
        second *= rstd
        g_first = dy_first * c + dy_second * s  # the rotation's transpose
        g_second = dy_second * c - dy_first * s
        dw_first += g_first * first
        dw_second += g_second * second
        g_first *= w_first
        g_second *= w_second
        mean = (tl.sum(g_first * first + g_second * second, axis=1) / (2 * half))[:, None]
        to = dx + row * dx_stride + head * (2 * half)
        _store_halves(to, column, half, mask, (g_first - first * mean) * rstd, (g_second - second * mean) * rstd)
    to = partial + tl.program_id(0) * (2 * half) + column
    tl.store(to, tl.sum(dw_first, axis=0), mask=column < half)
    tl.store(to + half, tl.sum(dw_second, axis=0), mask=column < half)


def norm_rotate_forward(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, out: Tensor | None = None
) -> Tensor:
    """x [R, heads, D] bf16 or fp32, weight [D] fp32 or x.dtype, cos and sin [R, D/2] fp32 → y like x.

    out [R, heads, D] of x.dtype is written where given, else a new contiguous tensor. eps > 0. R·heads < 2^31.
    Raises ValueError for other shapes or strides.
    """
    _check(x, weight, cos, sin)
    y = _destination(x, out)
    rows, heads, size = x.shape
    launch = _launch(heads, size)
    if rows > 0:
        _forward_kernel[(triton.cdiv(rows * heads, launch["tile"]),)](
            x,
            weight,
            cos,
            sin,
            y,
            rows * heads,
            x.stride(0),
            cos.stride(0),
            sin.stride(0),
            y.stride(0),
            eps,
            **launch,
        )
    return y


def norm_rotate_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dy [R, heads, D] and the arguments of the forward pass → dx [R, heads, D] of x.dtype, dweight [D] fp32.

    out [R, heads, D] of x.dtype takes dx where given, else a new contiguous tensor. Deterministic.
    """
    _check(x, weight, cos, sin)
    dx = _destination(x, out)
    dy = dy if _by_rows(dy) else dy.contiguous()
    rows, heads, size = x.shape
    launch = _launch(heads, size)
    tiles = triton.cdiv(rows * heads, launch["tile"])
    programs = min(PROGRAMS, tiles)
    partial = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    if rows > 0:
        _backward_kernel[(programs,)](
            dy,
            x,
            weight,
            cos,
            sin,
            dx,
            partial,
            rows * heads,
            dy.stride(0),
            x.stride(0),
            cos.stride(0),
            sin.stride(0),
            dx.stride(0),
            eps,
            steps=triton.cdiv(tiles, programs),
            stages=STAGES,
            **launch,
        )
    return dx, partial.sum(0)


def norm_rotate(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Norm over D, then rotation: arguments and errors as in `norm_rotate_forward`, without `out`.

    Keeps x as it is (a slice stays a slice) and nothing else of its size. No gradient for cos and sin.
    """
    y: Tensor = _NormRotate.apply(x, weight, eps, cos, sin)  # type: ignore[no-untyped-call]
    return y


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, weight, cos, sin)
        return norm_rotate_forward(x, weight, eps, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, cos, sin = ctx.saved_tensors
        dx, dweight = norm_rotate_backward(dy, x, weight, ctx.eps, cos, sin)
        return dx, dweight.to(weight.dtype), None, None, None


def _check(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> None:
    if x.ndim != 3 or x.shape[2] % 2 or x.shape[2] == 0 or not _by_rows(x):
        raise ValueError(f"x must be [R, heads, even D] with whole rows, is {tuple(x.shape)}, strides {x.stride()}")
    if weight.shape != x.shape[2:] or not weight.is_contiguous():
        raise ValueError(f"weight must be a contiguous [{x.shape[2]}], is {tuple(weight.shape)}")
    for table in (cos, sin):
        if table.shape != (x.shape[0], x.shape[2] // 2) or table.stride(1) != 1 or table.dtype != torch.float32:
            raise ValueError(f"cos and sin must be [R, D/2] fp32, are {tuple(table.shape)} {table.dtype}")


def _by_rows(x: Tensor) -> bool:
    """Whether each row of x [R, heads, D] is heads · D consecutive numbers."""
    return x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])


def _destination(x: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.shape != x.shape or out.dtype != x.dtype or not _by_rows(out):
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype}, strides {out.stride()}; x is {tuple(x.shape)}")
    return out


def _launch(heads: int, size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size // 2)
    return {"heads": heads, "half": size // 2, "tile": max(TILE_ELEMENTS // block, 1), "block": block, "num_warps": 4}
