"""Who sees whom in training, and attention under that rule.

A block at anchor p sees the context strictly before p, of its own document, and its own block. Never the state at p: at
inference it does not exist yet. Blocks never see each other. In a sliding layer with window W, slot k sees keys at most
W − 1 positions behind p + k (and, where the layer is not causal, at most W − 1 ahead).

Two implementations of the seam `model.Attend`: `dense` is the plain reference, one mask over everything; `by_document`
does the same work document by document, at a fraction of the time and memory where documents are short.

Legend: T context tokens, N anchors, B block size, M = N·B draft tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from draftmill.drafter.blocks import Blocks
from draftmill.drafter.config import DrafterSpec
from draftmill.drafter.model import Attend

Kind = tuple[int | None, bool]  # window, causal inside the block

# Not cuDNN: it plans anew for every shape, and each document has its own (10 s a step on an H200).
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def visible(blocks: Blocks, document_ids: Tensor, position_ids: Tensor, *, window: int | None, causal: bool) -> Tensor:
    """The mask by its definition: [N·B, T + N·B] bool, True where a draft token sees a context or draft token.

    document_ids, position_ids: [T] int of the context.
    """
    number, size = blocks.tokens.shape
    device = document_ids.device
    owner = torch.arange(number, device=device).repeat_interleave(size)  # block of each draft token
    place = blocks.position_ids.flatten()
    context_place = torch.arange(document_ids.shape[0], device=device)
    before = context_place[None, :] < blocks.anchors[owner][:, None]
    same = document_ids.long()[None, :] == blocks.document_ids[owner][:, None]
    real = (blocks.document_ids[owner] >= 0)[:, None]
    to_context = before & same & real
    to_block = owner[:, None] == owner[None, :]
    if causal:
        to_block &= place[None, :] <= place[:, None]
    if window is not None:
        to_context &= place[:, None] - position_ids.long()[None, :] < window
        to_block &= (place[:, None] - place[None, :]).abs() < window
    return torch.cat((to_context, to_block), dim=1)


def kinds(spec: DrafterSpec) -> list[Kind]:
    """(window, causal) of each layer. Layers of the same kind share a mask."""
    return [(spec.window(layer), spec.layer_causal[layer]) for layer in range(spec.layers)]


def attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention: [M, Hq, D], [S, Hkv, D] twice, mask [M, S] bool or None → [M, Hq, D]."""
    groups = queries.shape[1] // keys.shape[1]
    q = queries.transpose(0, 1)[None]
    k = keys.repeat_interleave(groups, dim=1).transpose(0, 1)[None]
    v = values.repeat_interleave(groups, dim=1).transpose(0, 1)[None]
    with sdpa_kernel(BACKENDS):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[0].transpose(0, 1)


def dense(spec: DrafterSpec, blocks: Blocks, document_ids: Tensor, position_ids: Tensor) -> Attend:
    """One mask per kind of layer over the whole batch. Memory grows with N·B·(T + N·B)."""
    per_layer = kinds(spec)
    masks = {
        kind: visible(blocks, document_ids, position_ids, window=kind[0], causal=kind[1]) for kind in set(per_layer)
    }
    return lambda layer, q, k, v: attention(q, k, v, masks[per_layer[layer]])


def by_document(spec: DrafterSpec, blocks: Blocks, document_ids: Tensor, position_ids: Tensor) -> Attend:
    """The same attention, one document after another: its draft tokens see only its own context and blocks.

    Needs anchors in increasing order without padding (`trim_padding`), documents in contiguous runs.
    """
    per_layer, context = kinds(spec), document_ids.shape[0]
    size = blocks.tokens.shape[1]
    pieces = []
    for document in torch.unique_consecutive(blocks.document_ids).tolist():
        rows = (blocks.document_ids == document).nonzero().squeeze(-1)
        own = blocks.select(slice(int(rows[0]), int(rows[-1]) + 1))
        start = int((document_ids == document).nonzero()[0])
        end = int(own.anchors[-1])  # nothing at or behind the last anchor is seen by any block
        local = Blocks(own.anchors - start, *own.tensors()[1:])
        masks = {
            kind: visible(local, document_ids[start:end], position_ids[start:end], window=kind[0], causal=kind[1])
            for kind in set(per_layer)
        }
        pieces.append((slice(int(rows[0]) * size, (int(rows[-1]) + 1) * size), slice(start, end), masks))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = []
        for draft, seen, masks in pieces:
            drafted = slice(context + draft.start, context + draft.stop)
            keys, values = (torch.cat((x[seen], x[drafted])) for x in (k, v))
            out.append(attention(q[draft], keys, values, masks[per_layer[layer]]))
        return torch.cat(out)

    return attend


def trim_padding(blocks: Blocks) -> Blocks:
    """Without the padding anchors at the end. For devices where shapes may vary."""
    return blocks.select(slice(0, int((blocks.anchors >= 0).sum())))
