"""SwiGLU of one merged projection: silu(gate) · up, gate and up side by side in each row.

As in `model.MLP`, but fp32 inside and rounded once. One read and one write of each tensor. The plain functions serve
callers with an autograd Function of their own, which keep only the projection and make the product again.

Legend: R rows, F intermediate size. gate_up [R, 2F]: the first F columns are the gate, the last F are up.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1024  # columns of one program, in 4 warps: one 16-byte access of bf16 for each thread and tensor


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(
    gate_up: tl.tensor, y: tl.tensor, stride: tl.tensor, y_stride: tl.tensor, size: tl.constexpr, block: tl.constexpr
) -> None:
    blocks: tl.constexpr = tl.cdiv(size, block)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * block + tl.arange(0, block)
    inside = column < size
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + column, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(y + row * y_stride + column, product.to(y.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(
    gate_up: tl.tensor,
    dy: tl.tensor,
    gradient: tl.tensor,
    y: tl.tensor,
    stride: tl.tensor,
    dy_stride: tl.tensor,
    gradient_stride: tl.tensor,
    y_stride: tl.tensor,
    size: tl.constexpr,
    block: tl.constexpr,
    again: tl.constexpr,
) -> None:
    blocks: tl.constexpr = tl.cdiv(size, block)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * block + tl.arange(0, block)
    inside = column < size
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + column, mask=inside, other=0.0).to(tl.float32)
    above = tl.load(dy + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    to = gradient + row * gradient_stride + column
    dgate = above * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    tl.store(to, dgate.to(gradient.dtype.element_ty), mask=inside)
    tl.store(to + size, (above * silu).to(gradient.dtype.element_ty), mask=inside)
    if again:
        tl.store(y + row * y_stride + column, (silu * up).to(y.dtype.element_ty), mask=inside)


def swiglu_forward(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """gate_up [R, 2F] bf16 or fp32 with contiguous rows → silu(gate) · up [R, F], written to `out` where given.

    Raises ValueError for other shapes or strides.
    """
    _check(gate_up)
    y = _product(gate_up, out)
    rows, size = y.shape
    launch = _launch(size)
    if rows > 0:
        grid = (rows * triton.cdiv(size, launch["block"]),)
        _forward_kernel[grid](gate_up, y, gate_up.stride(0), y.stride(0), size=size, **launch)
    return y


def swiglu_backward(
    gate_up: Tensor, grad_out: Tensor, grad_in_place: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """gate_up [R, 2F], grad_out [R, F] → the gradient of gate_up [R, 2F], and silu(gate) · up [R, F] made again.

    grad_in_place: the gradient overwrites gate_up and is returned as the same tensor. out [R, F] takes the product;
    it may be grad_out, which is then overwritten. Raises ValueError as `swiglu_forward`.
    """
    _check(gate_up)
    gradient = gate_up if grad_in_place else torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    y = _product(gate_up, out)
    _backward(gate_up, grad_out, gradient, y)
    return gradient, y


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [R, 2F] bf16 or fp32 with contiguous rows → silu(gate) · up [R, F]. Keeps gate_up alone.

    Errors as in `swiglu_forward`.
    """
    y: Tensor = _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_forward(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gradient = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        _backward(gate_up, dy, gradient, None)
        return gradient


def _backward(gate_up: Tensor, dy: Tensor, gradient: Tensor, y: Tensor | None) -> None:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if dy.shape != (rows, size):
        raise ValueError(f"the gradient of [{rows}, {size}] is {tuple(dy.shape)}")
    dy = dy if dy.stride(1) == 1 else dy.contiguous()  # gradients can come in expanded or transposed
    launch = _launch(size)
    if rows > 0:
        _backward_kernel[(rows * triton.cdiv(size, launch["block"]),)](
            gate_up,
            dy,
            gradient,
            y,
            gate_up.stride(0),
            dy.stride(0),
            gradient.stride(0),
            0 if y is None else y.stride(0),
            size=size,
            again=y is not None,
            **launch,
        )


def _check(gate_up: Tensor) -> None:
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or gate_up.shape[1] == 0 or gate_up.stride(1) != 1:
        raise ValueError(f"must be [R, 2F] with contiguous rows: {tuple(gate_up.shape)}, strides {gate_up.stride()}")


def _product(gate_up: Tensor, out: Tensor | None) -> Tensor:
    shape = (gate_up.shape[0], gate_up.shape[1] // 2)
    if out is None:
        return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
    if out.shape != shape or out.dtype != gate_up.dtype or out.stride(1) != 1:
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype}, strides {out.stride()}, not {shape}")
    return out


def _launch(size: int) -> dict[str, int]:
    return {"block": min(BLOCK, triton.next_power_of_2(size)), "num_warps": 4}
