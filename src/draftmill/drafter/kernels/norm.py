"""Root-mean-square norm of rows, alone or fused with the residual addition before it.

`model.RMSNorm` in the same rounding order: y = weight.to(x.dtype) · (x · rstd).to(x.dtype), everything else in fp32.
Each tensor is read once and written once. The plain functions serve callers with an autograd Function of their own.

Legend: R rows, H row size, rstd = 1 / sqrt(mean(x²) + eps).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

LARGEST = 8192  # a row lies in one program's registers
FORWARD_ELEMENTS = 32  # of a row, for each thread
BACKWARD_ELEMENTS = 16  # fewer: five rows of numbers are alive at once
BACKWARD_WARPS = 4224  # over all programs, 32 for each multiprocessor of an H200
STAGES = 3  # of the backward pass: each program copies two rows ahead while it works on one


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    rstd: tl.tensor,
    x_stride: tl.tensor,
    delta_stride: tl.tensor,
    eps: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
    add: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < size
    wide = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if add:
        wide += tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + row * size + columns, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(y.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    tl.store(rstd + row, scale)
    normed = (wide * scale).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * size + columns, (w * normed).to(y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(
    dy: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    rstd: tl.tensor,
    residual: tl.tensor,
    dx: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    dy_stride: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
    add: tl.constexpr,
    steps: tl.constexpr,  # a constant: the interpreter cannot loop to anything else
    stages: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < size
    w = tl.load(weight + columns, mask=inside, other=0.0).to(x.dtype.element_ty).to(tl.float32)
    dweight = tl.zeros([block], dtype=tl.float32)
    for step in tl.range(0, steps, num_stages=stages):
        row = program + step * tl.num_programs(0)
        mask = inside & (row < rows)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)
        normed = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32) * scale
        above = tl.load(dy + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        dweight += above * normed
        above *= w
        below = (above - normed * (tl.sum(above * normed, axis=0) / size)) * scale
        if add:
            below += tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + row * size + columns, below.to(dx.dtype.element_ty), mask=mask)
    tl.store(partial + program * size + columns, dweight, mask=inside)


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [R, H] bf16 or fp32 with contiguous rows, weight [H] fp32 or x.dtype → y [R, H] of x.dtype, rstd [R] fp32.

    Raises ValueError for other shapes, or H over `LARGEST`.
    """
    y, rstd, _ = _forward(x, None, weight, eps)
    return y, rstd


def add_rms_norm_forward(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x, delta [R, H] → x + delta [R, H], its norm [R, H], rstd [R] fp32. Otherwise as `rms_norm_forward`."""
    if delta.shape != x.shape or delta.dtype != x.dtype:
        raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, delta is {tuple(delta.shape)} {delta.dtype}")
    y, rstd, total = _forward(x, delta, weight, eps)
    assert total is not None
    return total, y, rstd


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dy, x [R, H], weight [H], rstd [R] of the forward pass → dx [R, H] of x.dtype, dweight [H] fp32.

    residual [R, H]: the gradient that reaches x past the norm, added to dx. After `add_rms_norm_forward`, x is the sum.
    Deterministic: the same inputs give the same bits.
    """
    _check(x, weight)
    rows, size = x.shape
    dy, residual = _unit_stride(dy), None if residual is None else _unit_stride(residual)
    dx = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    launch = _launch(size, BACKWARD_ELEMENTS)
    programs = min(BACKWARD_WARPS // launch["num_warps"], rows)
    partial = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    if rows > 0:
        _backward_kernel[(programs,)](
            dy,
            x,
            weight,
            rstd,
            residual,
            dx,
            partial,
            rows,
            dy.stride(0),
            x.stride(0),
            0 if residual is None else residual.stride(0),
            size=size,
            add=residual is not None,
            steps=triton.cdiv(rows, programs),
            stages=STAGES,
            **launch,
        )
    return dx, partial.sum(0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of each row: x [R, H] bf16 or fp32, weight [H] fp32 or x.dtype → [R, H] of x.dtype.

    Keeps x and one number a row for the backward pass. Errors as in `rms_norm_forward`.
    """
    y: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return y


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, delta [R, H] → x + delta and its norm, both [R, H] of x.dtype: a residual addition and the norm that follows.

    Keeps the sum and one number a row for the backward pass. Errors as in `add_rms_norm_forward`.
    """
    total, y = _AddRMSNorm.apply(x, delta, weight, eps)  # type: ignore[no-untyped-call]
    return total, y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = rms_norm_backward(dy, x, weight, rstd)
        return dx, dweight.to(weight.dtype), None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, y, rstd = add_rms_norm_forward(x, delta, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.set_materialize_grads(False)  # the last sum of a network is often unused: no reading of zeros for it
        return total, y

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dtotal: Tensor | None, dy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if dy is None:
            return dtotal, dtotal, None, None
        total, weight, rstd = ctx.saved_tensors
        dx, dweight = rms_norm_backward(dy, total, weight, rstd, dtotal)
        return dx, dx, dweight.to(weight.dtype), None


def _forward(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor | None]:
    _check(x, weight)
    rows, size = x.shape
    delta = None if delta is None else _unit_stride(delta)
    y = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    total = None if delta is None else torch.empty_like(y)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows > 0:
        _forward_kernel[(rows,)](
            x,
            delta,
            total,
            weight,
            y,
            rstd,
            x.stride(0),
            0 if delta is None else delta.stride(0),
            eps,
            size=size,
            add=delta is not None,
            **_launch(size, FORWARD_ELEMENTS),
        )
    return y, rstd, total


def _check(x: Tensor, weight: Tensor) -> None:
    if x.ndim != 2 or not 0 < x.shape[1] <= LARGEST or x.stride(1) != 1:
        raise ValueError(
            f"x must be [R, H ≤ {LARGEST}] with contiguous rows, is {tuple(x.shape)}, strides {x.stride()}"
        )
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"weight must be a contiguous [{x.shape[1]}], is {tuple(weight.shape)}")


def _unit_stride(x: Tensor) -> Tensor:
    """Gradients can come in expanded or transposed."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(size: int, elements_per_thread: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    return {"block": block, "num_warps": min(max(block // (32 * elements_per_thread), 1), 16)}
