"""Attention of a drafter's blocks over context and own block, as kernels, under the rule of `attention.visible`.

What a draft row sees is two intervals: context rows lo ≤ c < hi, and draft rows of its own block. Along the batch the
ends of these intervals never move backwards, so each tile of rows sees one interval of context, in three parts: one
whose rows only some of the tile see, one that all of them see (no mask there), and again one for some. The same holds
the other way round, for the draft rows that see a tile of context. Nothing else is visited.

Softmax is taken over powers of two (log₂e is part of the scale); `lse` is the base-2 logarithm of its denominator.
No atomics: the same inputs give the same bits.

Legend: T context rows, N anchors, B block size, M = N·B draft rows, Hq / Hkv query / key-value heads, D head size.
"""

# Kernels carry no types; their compile-time constants are written in capitals.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor


class Tile(NamedTuple):
    rows: int  # draft rows (queries) at a time
    columns: int  # keys at a time
    warps: int
    stages: int  # loads in flight


class Tiles(NamedTuple):
    forward: Tile
    queries: Tile  # backward, gradient of the queries
    context: Tile  # backward, gradients of the context's keys and values
    draft: Tile  # backward, gradients of the draft rows' keys and values


# By head size and bytes per element. Four-byte inputs are multiplied without tensor cores: for tests, not for speed.
TILES = {
    (64, 2): Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    (128, 2): Tiles(Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2), Tile(32, 64, 4, 2)),
    (64, 4): Tiles(*[Tile(32, 32, 4, 1)] * 4),
    (128, 4): Tiles(*[Tile(32, 32, 4, 1)] * 4),
}
ALIGNED = tl.constexpr(16)  # rows: loads of one number per row start at multiples of this


@dataclass(frozen=True, slots=True)
class Ranges:
    """Who sees whom in one batch and one kind of layer.

    lo, hi  [M]        int32  draft row r sees the context rows lo[r] ≤ c < hi[r]; lo = hi where it sees none
    seers   [4, T + 1] int32  draft rows from seers[0, a] up to seers[1, b] see some of the context rows a ≤ c < b;
                              those from seers[2, b] up to seers[3, a] see all of them
    block_size                of its own block a row sees rows less than `reach` away,
    reach, causal             and none behind itself if causal
    """

    lo: Tensor
    hi: Tensor
    seers: Tensor
    block_size: int
    reach: int
    causal: bool


def ranges(
    anchors: Tensor, document_starts: Tensor, *, block_size: int, context_rows: int, window: int | None, causal: bool
) -> Ranges:
    """The intervals of a batch of `context_rows` context rows. Shapes are fixed and nothing waits for the device.

    anchors          [N] int  rows of the context, increasing, padding (−1) at the end
    document_starts  [N] int  first row of the anchor's document; anything for a padding anchor
    window                    slot k of the block at anchor p sees no row before p + k − window + 1
    """
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    real = anchors >= 0
    hi = torch.where(real, anchors, context_rows)  # [N]; a padding anchor sees nothing of lo = hi = T
    lo = torch.where(real, document_starts, context_rows)[:, None].expand(-1, block_size)  # [N, B]
    if window is not None:
        behind = torch.arange(1 - window, 1 - window + block_size, device=anchors.device)
        lo = torch.minimum(torch.maximum(lo, hi[:, None] + behind), hi[:, None])
    hi, lo = hi.int(), lo.int()
    first, last = lo[:, 0].contiguous(), lo[:, -1].contiguous()  # smallest and largest lo of each block
    place = torch.arange(context_rows + 1, dtype=torch.int32, device=anchors.device)

    def count(ends: Tensor, *, or_equal: bool) -> Tensor:
        """[T + 1]: how many of the ends [N] lie before (or at) each place."""
        return torch.searchsorted(ends, place, right=or_equal, out_int32=True)

    seers = torch.stack(
        (
            count(hi, or_equal=True),  # the first block with a < hi
            count(first, or_equal=False),  # behind the last one with lo < b
            count(hi, or_equal=False),  # the first one with b ≤ hi
            count(last, or_equal=True),  # behind the last one with lo ≤ a
        )
    )
    return Ranges(
        lo=lo.flatten(),
        hi=hi[:, None].expand(-1, block_size).flatten(),
        seers=seers * block_size,
        block_size=block_size,
        reach=block_size if window is None else min(window, block_size),
        causal=causal,
    )


def block_attention(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    draft_keys: Tensor,
    draft_values: Tensor,
    ranges: Ranges,
) -> Tensor:
    """softmax(q·k / √D)·v over what each draft row sees, with gradients for all five tensors.

    queries [M, Hq, D], context_keys and context_values [T, Hkv, D], draft_keys and draft_values [M, Hkv, D], all of one
    dtype (bf16 or fp16; fp32 is exact but slow) and of any strides whose last is 1 → [M, Hq, D], contiguous. Products
    are summed in fp32. D is 64 or 128, Hq a multiple of Hkv. ValueError for anything else.
    """
    given = (queries, context_keys, context_values, draft_keys, draft_values)
    _check(given, ranges)
    out: Tensor = _BlockAttention.apply(*given, ranges)
    return out


def _check(given: tuple[Tensor, ...], ranges: Ranges) -> None:
    queries, context_keys, context_values, draft_keys, draft_values = given
    rows, heads, size = queries.shape
    key_heads, context_rows = draft_keys.shape[1], ranges.seers.shape[1] - 1
    if (size, queries.element_size()) not in TILES or not queries.is_floating_point():
        raise ValueError(f"head size {size} of {queries.dtype}: there are tiles for {sorted(TILES)} (size, bytes)")
    if heads % key_heads or rows != ranges.lo.shape[0]:
        raise ValueError(f"queries {tuple(queries.shape)} for {key_heads} key heads and {ranges.lo.shape[0]} rows")
    for name, tensor, length in (
        ("context keys", context_keys, context_rows),
        ("context values", context_values, context_rows),
        ("draft keys", draft_keys, rows),
        ("draft values", draft_values, rows),
    ):
        if tuple(tensor.shape) != (length, key_heads, size):
            raise ValueError(f"{name} are {tuple(tensor.shape)}, expected {(length, key_heads, size)}")
    if any(tensor.dtype != queries.dtype or tensor.stride(-1) != 1 for tensor in given):
        raise ValueError("queries, keys and values must have one dtype and a last stride of 1")
    for tensor in given:
        row, head = tensor.stride()[:2]
        if any(n % 16 for n in (tensor.data_ptr(), row * tensor.element_size(), head * tensor.element_size())):
            raise ValueError("start, row stride and head stride must be multiples of 16 bytes, as the loads need them")
        if row < (tensor.shape[1] - 1) * head + size:
            raise ValueError(f"the heads of a row must lie together, not at strides {tensor.stride()}")


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *given, ranges = arguments
        queries = given[0]
        rows, heads, size = queries.shape
        out = torch.empty((rows, heads, size), dtype=queries.dtype, device=queries.device)
        pitch = triton.cdiv(rows, ALIGNED.value) * ALIGNED.value
        lse = torch.empty((heads, pitch), dtype=torch.float32, device=queries.device)
        tile = TILES[size, queries.element_size()].forward
        _forward[triton.cdiv(rows, tile.rows), heads](
            by_head(queries, tile.rows), *(by_head(tensor, tile.columns) for tensor in given[1:]),
            out, lse, ranges.lo, ranges.hi, *head_strides(given), rows, **constants(given, ranges, tile),
        )  # fmt: skip
        ctx.save_for_backward(*given, out, lse)
        ctx.ranges = ranges
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from draftmill.drafter.kernels.attention_backward import backward  # it is built on this module

        *given, out, lse = ctx.saved_tensors
        return *backward(given, out, lse, gradients[0].contiguous(), ctx.ranges), None


def by_head(tensor: Tensor, rows: int) -> TensorDescriptor:
    """[L, heads, D] for loads of `rows` rows of one head, found at column head · stride; zeros past the end."""
    length, heads, size = tensor.shape
    width = (heads - 1) * tensor.stride(1) + size
    return TensorDescriptor(tensor, [length, width], [tensor.stride(0), 1], [rows, size])


def head_strides(given: list[Tensor]) -> list[int]:
    return [tensor.stride(1) for tensor in given]


def constants(given: list[Tensor], ranges: Ranges, tile: Tile) -> dict[str, Any]:
    """What the kernels are compiled for, in their names."""
    heads, key_heads, size = given[0].shape[1], given[3].shape[1], given[0].shape[2]
    return {
        "HEADS": heads, "GROUP": heads // key_heads, "D": size, "SCALE": 1 / math.sqrt(size),
        "B": ranges.block_size, "REACH": ranges.reach, "CAUSAL": ranges.causal,
        "ROWS": tile.rows, "COLUMNS": tile.columns, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


# Kernels ------------------------------------------------------------------------------------------------------------

LOG2E = tl.constexpr(1.4426950408889634)
FURTHEST = tl.constexpr(2**31 - 1)


@triton.jit
def own_block(rows, B: tl.constexpr, REACH: tl.constexpr, CAUSAL: tl.constexpr):
    """The interval of draft rows that each draft row sees: its own block."""
    block = rows // B * B
    lo = tl.maximum(block, rows - REACH + 1)
    hi = tl.minimum(block + B, rows + (1 if CAUSAL else REACH))
    return lo, hi


@triton.jit
def cut(start, full_start, full_stop, stop, STEP: tl.constexpr):
    """Cut start … stop into masked, full and masked parts, the first two in whole tiles: the ends of the full one."""
    full = tl.minimum(start + tl.cdiv(tl.maximum(full_start - start, 0), STEP) * STEP, stop)
    return full, full + tl.maximum(tl.minimum(full_stop, stop) - full, 0) // STEP * STEP


@triton.jit
def seen_context(lo, hi, STEP: tl.constexpr):
    """The interval of context that any of a tile's rows see, and within it the ends of the part that all see."""
    some = lo < hi
    stop = tl.max(tl.where(some, hi, 0))
    start = tl.minimum(tl.min(tl.where(some, lo, FURTHEST)), stop)
    full, full_stop = cut(start, tl.max(lo), tl.min(hi), stop, STEP)
    return start, full, full_stop, stop


@triton.jit
def at(rows, head, HEADS: tl.constexpr, D: tl.constexpr):
    """Offsets of a head's rows in a contiguous [rows, HEADS, D]."""
    return (rows.to(tl.int64) * HEADS + head)[:, None] * D + tl.arange(0, D)[None, :]


@triton.jit
def _attend(
    acc, peak, total, q, keys, k_at, values, v_at, start, stop, lo, hi,
    SCALE: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take keys start … stop into the running softmax: acc [ROWS, D], peak and total [ROWS]."""
    for first in tl.range(start, stop, COLUMNS):
        k = keys.load([first, k_at])
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            columns = first + tl.arange(0, COLUMNS)[None, :]
            scores = tl.where((lo[:, None] <= columns) & (columns < hi[:, None]), scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1) * (SCALE * LOG2E))
        p = tl.math.exp2(scores * (SCALE * LOG2E) - higher[:, None])
        shrink = tl.math.exp2(peak - higher)
        total = total * shrink + tl.sum(p, 1)
        v = values.load([first, v_at])
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = higher
    return acc, peak, total


@triton.jit
def _forward(
    q_tiles, kc_tiles, vc_tiles, kd_tiles, vd_tiles, out_ptr, lse_ptr, lo_ptr, hi_ptr,
    q_head, kc_head, vc_head, kd_head, vd_head, M,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    B: tl.constexpr, REACH: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of draft rows, Hq)."""
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    kv_head = head // GROUP
    place = first + tl.arange(0, ROWS)
    live = place < M
    rows = tl.minimum(place, M - 1)  # past the end: no query, in the place of the last row
    q = q_tiles.load([first, head * q_head])
    k_at, v_at = kv_head * kd_head, kv_head * vd_head
    lo, hi = own_block(rows, B, REACH, CAUSAL)
    start, stop = first // B * B, tl.cdiv(tl.minimum(first + ROWS, M), B) * B
    # Not −∞, which would make NaN of a row that sees nothing of the first tile.
    peak = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    acc, peak, total = _attend(
        acc, peak, total, q, kd_tiles, k_at, vd_tiles, v_at, start, stop, lo, hi, SCALE, COLUMNS, True
    )
    k_at, v_at = kv_head * kc_head, kv_head * vc_head
    lo, hi = tl.load(lo_ptr + rows), tl.load(hi_ptr + rows)
    start, full, full_stop, stop = seen_context(lo, hi, COLUMNS)
    acc, peak, total = _attend(
        acc, peak, total, q, kc_tiles, k_at, vc_tiles, v_at, start, full, lo, hi, SCALE, COLUMNS, True
    )
    acc, peak, total = _attend(
        acc, peak, total, q, kc_tiles, k_at, vc_tiles, v_at, full, full_stop, lo, hi, SCALE, COLUMNS, False
    )
    acc, peak, total = _attend(
        acc, peak, total, q, kc_tiles, k_at, vc_tiles, v_at, full_stop, stop, lo, hi, SCALE, COLUMNS, True
    )
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at(rows, head, HEADS, D), out, mask=live[:, None])
    pitch = tl.cdiv(M, ALIGNED) * ALIGNED  # all of it is stored: what lies behind the last row is loaded too
    tl.store(lse_ptr + head.to(tl.int64) * pitch + place, peak + tl.math.log2(total), mask=place < pitch)
