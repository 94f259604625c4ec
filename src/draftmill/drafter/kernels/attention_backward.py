"""The backward pass of `attention`: for queries, for keys and values of the context, and for those of the blocks.

The kernels walk the intervals described there. Legend as there.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from draftmill.drafter.kernels.attention import (
    ALIGNED,
    LOG2E,
    TILES,
    Ranges,
    at,
    by_head,
    constants,
    cut,
    head_strides,
    own_block,
    seen_context,
)


def backward(given: list[Tensor], out: Tensor, lse: Tensor, grad_out: Tensor, ranges: Ranges) -> list[Tensor]:
    """Gradients of the five tensors given to `block_attention`, contiguous.

    lse [Hq, M rounded up to ALIGNED], as the forward kernel left it; out, grad_out [M, Hq, D], contiguous.
    """
    rows, key_heads, _ = given[3].shape
    context_rows, heads, tiles = given[1].shape[0], out.shape[1], TILES[out.shape[2], out.element_size()]
    grads = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in given]
    delta = torch.empty_like(lse)  # Σ_d grad_out · out, made by the first kernel for the others
    tile = tiles.queries
    backward_queries[triton.cdiv(rows, tile.rows), heads](
        by_head(given[0], tile.rows), *(by_head(tensor, tile.columns) for tensor in given[1:]),
        by_head(out, tile.rows), by_head(grad_out, tile.rows), lse, delta, grads[0], ranges.lo, ranges.hi,
        *head_strides(given), rows, **constants(given, ranges, tile),
    )  # fmt: skip
    tile = tiles.context
    backward_context[key_heads, triton.cdiv(context_rows, tile.columns)](
        by_head(given[0], tile.rows), *(by_head(tensor, tile.columns) for tensor in given[1:3]),
        by_head(grad_out, tile.rows), *(by_row(tensor, tile.rows) for tensor in (lse, delta, ranges.lo, ranges.hi)),
        *grads[1:3], ranges.seers, *head_strides(given)[:3], rows, context_rows, **constants(given, ranges, tile),
    )  # fmt: skip
    tile = tiles.draft
    backward_draft[key_heads, triton.cdiv(rows, tile.columns)](
        by_head(given[0], tile.rows), *(by_head(tensor, tile.columns) for tensor in given[3:]),
        by_head(grad_out, tile.rows), *(by_row(tensor, tile.rows) for tensor in (lse, delta)),
        *grads[3:], head_strides(given)[0], *head_strides(given)[3:], rows, **constants(given, ranges, tile),
    )  # fmt: skip
    return grads


def by_row(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Numbers, one a row, for loads of `rows` of them; zeros past the end."""
    return TensorDescriptor(tensor, [tensor.numel()], [1], [rows])


@triton.jit
def _to_queries(
    acc, q, grad_out, lse, delta, keys, k_at, values, v_at, start, stop, lo, hi,
    SCALE: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what keys start … stop give to the gradient of the queries, without the scale: acc [ROWS, D]."""
    for first in tl.range(start, stop, COLUMNS):
        k = keys.load([first, k_at])
        v = values.load([first, v_at])
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        grad_p = tl.dot(grad_out, tl.trans(v), input_precision="ieee")
        p = tl.math.exp2(scores * (SCALE * LOG2E) - lse[:, None])
        if MASKED:
            columns = first + tl.arange(0, COLUMNS)[None, :]
            p = tl.where((lo[:, None] <= columns) & (columns < hi[:, None]), p, 0.0)
        grad_scores = p * (grad_p - delta[:, None])
        acc = tl.dot(grad_scores.to(k.dtype), k, acc, input_precision="ieee")
    return acc


@triton.jit
def backward_queries(
    q_tiles, kc_tiles, vc_tiles, kd_tiles, vd_tiles, out_tiles, grad_out_tiles,
    lse_ptr, delta_ptr, grad_q_ptr, lo_ptr, hi_ptr, q_head, kc_head, vc_head, kd_head, vd_head, M,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    B: tl.constexpr, REACH: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of draft rows, Hq). The same walk as that of the forward kernel; also makes delta."""
    first, head = tl.program_id(0) * ROWS, tl.program_id(1)
    kv_head = head // GROUP
    place = first + tl.arange(0, ROWS)
    rows = tl.minimum(place, M - 1)
    grad_out = grad_out_tiles.load([first, head * D])
    delta = tl.sum(grad_out.to(tl.float32) * out_tiles.load([first, head * D]).to(tl.float32), 1)
    pitch = tl.cdiv(M, ALIGNED) * ALIGNED
    numbers = head.to(tl.int64) * pitch + place
    tl.store(delta_ptr + numbers, delta, mask=place < pitch)
    lse = tl.load(lse_ptr + numbers, mask=place < pitch, other=0.0)
    q = q_tiles.load([first, head * q_head])
    k_at, v_at = kv_head * kd_head, kv_head * vd_head
    lo, hi = own_block(rows, B, REACH, CAUSAL)
    start, stop = first // B * B, tl.cdiv(tl.minimum(first + ROWS, M), B) * B
    acc = tl.zeros((ROWS, D), tl.float32)
    acc = _to_queries(
        acc, q, grad_out, lse, delta, kd_tiles, k_at, vd_tiles, v_at, start, stop, lo, hi, SCALE, COLUMNS, True
    )
    k_at, v_at = kv_head * kc_head, kv_head * vc_head
    lo, hi = tl.load(lo_ptr + rows), tl.load(hi_ptr + rows)
    start, full, full_stop, stop = seen_context(lo, hi, COLUMNS)
    acc = _to_queries(
        acc, q, grad_out, lse, delta, kc_tiles, k_at, vc_tiles, v_at, start, full, lo, hi, SCALE, COLUMNS, True
    )
    acc = _to_queries(
        acc, q, grad_out, lse, delta, kc_tiles, k_at, vc_tiles, v_at, full, full_stop, lo, hi, SCALE, COLUMNS, False
    )
    acc = _to_queries(
        acc, q, grad_out, lse, delta, kc_tiles, k_at, vc_tiles, v_at, full_stop, stop, lo, hi, SCALE, COLUMNS, True
    )
    grad_q = (acc * SCALE).to(grad_q_ptr.dtype.element_ty)
    tl.store(grad_q_ptr + at(rows, head, HEADS, D), grad_q, mask=(place < M)[:, None])


FULL, CONTEXT, OWN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # how a tile of draft rows sees a tile of keys


@triton.jit
def _to_keys(
    acc_k, acc_v, k, v, q_tiles, q_at, grad_out_tiles, grad_at, lse_rows, delta_rows, numbers_at, lo_rows, hi_rows,
    start, stop, columns, SCALE: tl.constexpr, B: tl.constexpr, REACH: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Add what draft rows start … stop of one head give to the gradients of keys (without the scale) and values.

    The order of the products matters: with the last two of them side by side the registers of a D = 128 tile run out.
    """
    for first in tl.range(start, stop, ROWS):
        q = q_tiles.load([first, q_at])
        grad_out = grad_out_tiles.load([first, grad_at])
        lse, delta = lse_rows.load([numbers_at + first]), delta_rows.load([numbers_at + first])
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")  # [COLUMNS, ROWS]
        p = tl.math.exp2(scores * (SCALE * LOG2E) - lse[None, :])
        if SEEN == CONTEXT:
            lo, hi = lo_rows.load([first]), hi_rows.load([first])
            p = tl.where((lo[None, :] <= columns[:, None]) & (columns[:, None] < hi[None, :]), p, 0.0)
        if SEEN == OWN:
            lo, hi = own_block(first + tl.arange(0, ROWS), B, REACH, CAUSAL)
            p = tl.where((lo[None, :] <= columns[:, None]) & (columns[:, None] < hi[None, :]), p, 0.0)
        acc_v = tl.dot(p.to(grad_out.dtype), grad_out, acc_v, input_precision="ieee")
        grad_p = tl.dot(v, tl.trans(grad_out), input_precision="ieee")
        grad_scores = p * (grad_p - delta[None, :])
        acc_k = tl.dot(grad_scores.to(q.dtype), q, acc_k, input_precision="ieee")
    return acc_k, acc_v


@triton.jit
def backward_context(
    q_tiles, kc_tiles, vc_tiles, grad_out_tiles, lse_rows, delta_rows, lo_rows, hi_rows,
    grad_k_ptr, grad_v_ptr, seers_ptr, q_head, kc_head, vc_head, M, T,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    B: tl.constexpr, REACH: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (Hkv, tiles of context)."""
    kv_head, first = tl.program_id(0), tl.program_id(1) * COLUMNS
    stop = tl.minimum(first + COLUMNS, T)
    columns = first + tl.arange(0, COLUMNS)
    pitch = tl.cdiv(M, ALIGNED) * ALIGNED
    k = kc_tiles.load([first, kv_head * kc_head])
    v = vc_tiles.load([first, kv_head * vc_head])
    some, some_stop = tl.load(seers_ptr + first) // ALIGNED * ALIGNED, tl.load(seers_ptr + (T + 1) + stop)
    full, full_stop = tl.load(seers_ptr + 2 * (T + 1) + stop), tl.load(seers_ptr + 3 * (T + 1) + first)
    full, full_stop = cut(some, full, full_stop, some_stop, ROWS)
    acc_k = tl.zeros((COLUMNS, D), tl.float32)
    acc_v = tl.zeros((COLUMNS, D), tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        acc_k, acc_v = _to_keys(
            acc_k, acc_v, k, v, q_tiles, head * q_head, grad_out_tiles, head * D, lse_rows, delta_rows, head * pitch,
            lo_rows, hi_rows, some, full, columns, SCALE, B, REACH, CAUSAL, ROWS, CONTEXT,
        )  # fmt: skip
        acc_k, acc_v = _to_keys(
            acc_k, acc_v, k, v, q_tiles, head * q_head, grad_out_tiles, head * D, lse_rows, delta_rows, head * pitch,
            lo_rows, hi_rows, full, full_stop, columns, SCALE, B, REACH, CAUSAL, ROWS, FULL,
        )  # fmt: skip
        acc_k, acc_v = _to_keys(
            acc_k, acc_v, k, v, q_tiles, head * q_head, grad_out_tiles, head * D, lse_rows, delta_rows, head * pitch,
            lo_rows, hi_rows, full_stop, some_stop, columns, SCALE, B, REACH, CAUSAL, ROWS, CONTEXT,
        )  # fmt: skip
    _store(grad_k_ptr, acc_k * SCALE, columns, stop, kv_head, HEADS // GROUP, D)
    _store(grad_v_ptr, acc_v, columns, stop, kv_head, HEADS // GROUP, D)


@triton.jit
def backward_draft(
    q_tiles, kd_tiles, vd_tiles, grad_out_tiles, lse_rows, delta_rows,
    grad_k_ptr, grad_v_ptr, q_head, kd_head, vd_head, M,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    B: tl.constexpr, REACH: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (Hkv, tiles of draft rows as keys)."""
    kv_head, first = tl.program_id(0), tl.program_id(1) * COLUMNS
    stop = tl.minimum(first + COLUMNS, M)
    columns = first + tl.arange(0, COLUMNS)
    pitch = tl.cdiv(M, ALIGNED) * ALIGNED
    k = kd_tiles.load([first, kv_head * kd_head])
    v = vd_tiles.load([first, kv_head * vd_head])
    start, own_stop = first // B * B // ALIGNED * ALIGNED, tl.cdiv(stop, B) * B
    acc_k = tl.zeros((COLUMNS, D), tl.float32)
    acc_v = tl.zeros((COLUMNS, D), tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        acc_k, acc_v = _to_keys(
            acc_k, acc_v, k, v, q_tiles, head * q_head, grad_out_tiles, head * D, lse_rows, delta_rows, head * pitch,
            None, None, start, own_stop, columns, SCALE, B, REACH, CAUSAL, ROWS, OWN,
        )  # fmt: skip
    _store(grad_k_ptr, acc_k * SCALE, columns, stop, kv_head, HEADS // GROUP, D)
    _store(grad_v_ptr, acc_v, columns, stop, kv_head, HEADS // GROUP, D)


@triton.jit
def _store(ptr, tile, rows, stop, head, HEADS: tl.constexpr, D: tl.constexpr):
    """A tile of gradients into a contiguous [rows, HEADS, D], up to row `stop`."""
    tl.store(ptr + at(rows, head, HEADS, D), tile.to(ptr.dtype.element_ty), mask=(rows < stop)[:, None])
