"""Rounding of matrices to fp8 (e4m3), each row or column by a scale of its own: value · scale ≈ the number.

The largest number of a row or column goes to the end of e4m3's range. Maxima are taken over the bits of absolute
values, whose order is that of the numbers with NaN above all: one NaN or infinity makes a scale, and so every product
with its row or column, NaN.

Legend: R rows, K columns. All scales fp32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-100  # for rows of zeros
BLOCK = 4096  # columns of a row at a time
TILE_ROWS, TILE_COLUMNS = 64, 128  # of a matrix that is rounded both ways
_MAX = tl.constexpr(E4M3_MAX)
_SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _magnitude(x):
    """Bits of |x|, as an integer."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _rows_kernel(matrix, values, scales, stride, K: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([SIZE], tl.int32)
    for start in range(0, K, SIZE):
        columns = start + tl.arange(0, SIZE)
        x = tl.load(matrix + row * stride + columns, mask=columns < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _magnitude(x))
    scale = tl.max(largest, 0).to(tl.float32, bitcast=True) / _MAX
    scale = tl.where(scale < _SMALLEST, _SMALLEST, scale)  # not `maximum`, which would lose a NaN
    tl.store(scales + row, scale)
    inverse = 1.0 / scale
    for start in range(0, K, SIZE):
        columns = start + tl.arange(0, SIZE)
        x = tl.load(matrix + row * stride + columns, mask=columns < K, other=0.0).to(tl.float32)
        tl.store(values + row * K + columns, (x * inverse).to(values.dtype.element_ty), mask=columns < K)


@triton.jit
def _tile(R: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows, columns and mask of a program's tile of a contiguous [R, K]."""
    across: tl.constexpr = (K + COLUMNS - 1) // COLUMNS
    rows = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    return rows, columns, (rows < R)[:, None] & (columns < K)[None, :]


@triton.jit
def _largest_kernel(
    matrix, by_row, by_column, R: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    rows, columns, inside = _tile(R, K, ROWS, COLUMNS)
    x = tl.load(matrix + rows.to(tl.int64)[:, None] * K + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    magnitude = _magnitude(x)
    tl.atomic_max(by_row + rows, tl.max(magnitude, 1), mask=rows < R)
    tl.atomic_max(by_column + columns, tl.max(magnitude, 0), mask=columns < K)


@triton.jit
def _both_kernel(
    matrix, by_row, by_column, row_scales, column_scales, pitch,
    R: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns, inside = _tile(R, K, ROWS, COLUMNS)
    at = rows.to(tl.int64)[:, None] * K + columns[None, :]
    x = tl.load(matrix + at, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.load(row_scales + rows, mask=rows < R, other=1.0)
    tl.store(by_row + at, (x * inverse[:, None]).to(by_row.dtype.element_ty), mask=inside)
    inverse = 1.0 / tl.load(column_scales + columns, mask=columns < K, other=1.0)
    turned = tl.trans((x * inverse[None, :]).to(by_column.dtype.element_ty))
    at = columns.to(tl.int64)[:, None] * pitch + rows[None, :]
    tl.store(by_column + at, turned, mask=tl.trans(inside))


def round_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[R, K] bf16 or fp32 with contiguous rows → values [R, K] e4m3 and scales [R].

    A row with a NaN or an infinity becomes one that multiplies to NaN.
    """
    if matrix.ndim != 2 or matrix.stride(1) != 1:
        raise ValueError(f"must be [R, K] with contiguous rows: {tuple(matrix.shape)}, strides {matrix.stride()}")
    rows, size = matrix.shape
    values = torch.empty(rows, size, dtype=E4M3, device=matrix.device)
    scales = torch.empty(rows, dtype=torch.float32, device=matrix.device)
    block = min(BLOCK, triton.next_power_of_2(size))
    if rows > 0:
        _rows_kernel[(rows,)](matrix, values, scales, matrix.stride(0), size, block, num_warps=max(block // 1024, 1))
    return values, scales


def scales_of(magnitudes: Tensor) -> Tensor:
    """What `add_magnitudes` found → scales."""
    return (magnitudes.view(torch.float32) / E4M3_MAX).clamp_min(SMALLEST_SCALE)


def add_magnitudes(matrix: Tensor, by_row: Tensor, by_column: Tensor) -> None:
    """Raise the bits of the largest absolute values by row [R] and by column [K], int32, to those of matrix [R, K]."""
    rows, size = matrix.shape
    assert matrix.is_contiguous()
    grid = (triton.cdiv(rows, TILE_ROWS) * triton.cdiv(size, TILE_COLUMNS),)
    _largest_kernel[grid](matrix, by_row, by_column, rows, size, TILE_ROWS, TILE_COLUMNS)


def round_both(matrix: Tensor, by_row: Tensor, by_column: Tensor, row_scales: Tensor, column_scales: Tensor) -> None:
    """Round a contiguous matrix [R, K] by the given scales into by_row [R, K], contiguous, and by_column [K, R], which
    may be a part of wider rows."""
    rows, size = matrix.shape
    assert matrix.is_contiguous()
    assert by_row.is_contiguous()
    assert by_column.stride(1) == 1
    grid = (triton.cdiv(rows, TILE_ROWS) * triton.cdiv(size, TILE_COLUMNS),)
    _both_kernel[grid](
        matrix, by_row, by_column, row_scales, column_scales, by_column.stride(0), rows, size, TILE_ROWS, TILE_COLUMNS
    )
