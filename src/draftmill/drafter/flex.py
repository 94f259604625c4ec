"""The seam `model.Attend` on CUDA: block-sparse attention with fixed shapes, its tables computed from the anchors.

A draft row sees two runs of keys: context rows from its document's start, or from its window's, up to its anchor, and
draft rows of its own block. So four numbers per row say all (`Bounds`), and from them follows for every tile of
128 × 128 whether it is empty, partly or wholly visible, without looking at rows × keys. Nothing here waits for the
device, and all shapes depend on T, N and B only: it can be captured in a CUDA graph.

One compiled kernel serves layers of every kind: windows and causality are contents of the tables, not code.

Legend: T context tokens, N anchors, B block size, M = N·B draft tokens, S = T + M keys, D head size, Hq / Hkv query /
key-value heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

from draftmill.drafter.attention import kinds
from draftmill.drafter.blocks import Blocks
from draftmill.drafter.config import DrafterSpec
from draftmill.drafter.model import Attend

TILE = 128

# Without it, fewer than 128 draft tokens would take another kernel, made for decoding.
OPTIONS: FlexKernelOptions = {"FORCE_USE_FLEX_ATTENTION": True}


class Bounds(NamedTuple):
    """The key rows that each draft row sees: [context_from, context_to) and [own_from, own_to). All [M] int32.

    Draft row r is key T + r. The first interval lies below T and is empty where context_from ≥ context_to; the second
    always holds the row itself.
    """

    context_from: Tensor
    context_to: Tensor
    own_from: Tensor
    own_to: Tensor


def bounds(blocks: Blocks, position_ids: Tensor, *, window: int | None, causal: bool) -> Bounds:
    """The rule of `attention.visible` as intervals. position_ids [T] int: places in the documents, from 0 in each."""
    number, size = blocks.tokens.shape
    device = position_ids.device
    anchors = blocks.anchors.clamp_min(0)[:, None]  # (N, 1); before row 0 there is no context: right for padding
    slots = torch.arange(size, device=device)
    rows = position_ids.shape[0] + torch.arange(number * size, device=device).view(number, size)
    context_from = anchors - position_ids[anchors]
    own_from, own_to = rows - slots, rows - slots + size
    if causal:
        own_to = rows + 1
    if window is not None:
        context_from = torch.maximum(context_from, anchors + slots - window + 1)
        own_from = torch.maximum(own_from, rows - window + 1)
        own_to = torch.minimum(own_to, rows + window)
    return Bounds(*(x.expand(number, size).flatten().int() for x in (context_from, anchors, own_from, own_to)))


def tiles(seen: Bounds, keys: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Which tiles hold something visible, and which nothing invisible: two bool [⌈M/128⌉, ⌈S/128⌉], keys = S.

    A tile cut by the last row or the last key is never wholly visible.
    """
    # Rows of one block that lie in one tile are taken together: what they see is one interval on either side, so the
    # lowest start and the highest end lose nothing, and the comparison is smaller by that factor.
    group = math.gcd(block_size, TILE)
    padding = -seen.own_to.shape[0] % TILE  # rows that see nothing: [0, 0)
    starts, ends = (
        F.pad(torch.stack(pair), (0, padding)).view(2, -1, TILE // group, 1, group)  # (side, row tile, group, 1, row)
        for pair in ((seen.context_from, seen.own_from), (seen.context_to, seen.own_to))
    )
    first = torch.arange(0, keys, TILE, device=starts.device, dtype=starts.dtype)
    met = torch.maximum(starts.amin(-1), first) < torch.minimum(ends.amax(-1), first + TILE)
    covered = (starts.amax(-1) <= first) & (first + TILE <= ends.amin(-1))
    return met.any(0).any(1), covered.any(0).all(1)


def ordered(table: Tensor) -> tuple[Tensor, Tensor]:
    """A bool table [Q, K] as counts [1, 1, Q] and, in each row, the column numbers of its True entries first, in
    increasing order: [1, 1, Q, K]. Both int32."""
    columns = torch.argsort(table.int(), dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


def block_mask(seen: Bounds, keys: int, block_size: int) -> BlockMask:
    """The tables of the kernel for M rows and `keys` = S keys."""
    context_from, context_to, own_from, own_to = seen

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        context = (context_from[row] <= key) & (key < context_to[row])
        own = (own_from[row] <= key) & (key < own_to[row])
        return context | own

    touched, full = tiles(seen, keys, block_size)
    return BlockMask.from_kv_blocks(
        *ordered(touched & ~full),
        *ordered(full),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=sees,
        seq_lengths=(own_to.shape[0], keys),
    )


@functools.cache
def kernel() -> Callable[..., Tensor]:
    """The compiled attention, one for the process. Too many shapes are an error, never a silent dense computation."""
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return compiled


def flex(spec: DrafterSpec, blocks: Blocks, document_ids: Tensor, position_ids: Tensor) -> Attend:
    """Attention under the rule of `attention.visible`, for CUDA. D ≥ 16; forward and backward.

    document_ids, position_ids [T] int of the context: documents in contiguous runs, positions from 0 in each, so an
    anchor's position says where its document starts. blocks: increasing anchors, −1 for padding at the end. Fastest
    where T + M and M are multiples of 128. Compiles at the first call of each shape, for seconds.
    """
    per_layer, size = kinds(spec), blocks.tokens.shape[1]
    keys = document_ids.shape[0] + blocks.tokens.numel()
    masks = {
        kind: block_mask(bounds(blocks, position_ids, window=kind[0], causal=kind[1]), keys, size)
        for kind in set(per_layer)
    }

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, rows, D], no copy
        mask = masks[per_layer[layer]]
        out = kernel()(*heads_first, block_mask=mask, enable_gqa=True, kernel_options=OPTIONS)
        return out[0].transpose(0, 1)

    return attend
