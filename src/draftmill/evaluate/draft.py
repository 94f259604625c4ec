"""The drafter in decoding: the context's keys and values are computed once and kept; a block is one forward pass.

Legend: n context tokens, B block size, K taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftmill.drafter import attention
from draftmill.drafter.blocks import Blocks
from draftmill.drafter.config import DrafterSpec
from draftmill.drafter.model import Attend, Drafter, KeyValues


class Proposer:
    """Drafts blocks over a growing context.

    embedding, head: [V, H], the target's. capacity: context tokens to make room for at once; more are taken.
    """

    def __init__(self, drafter: Drafter, embedding: Tensor, head: Tensor, *, capacity: int) -> None:
        self._drafter, self._embedding, self._head = drafter, embedding, head
        self._spec = drafter.spec
        shape = (2, self._spec.layers, capacity, self._spec.num_key_value_heads, self._spec.head_dim)
        self._buffer = torch.empty(shape, dtype=embedding.dtype, device=embedding.device)  # keys, values
        self.length = 0

    @property
    def slots(self) -> int:
        """B−1, the drafted tokens of a whole block."""
        return self._spec.block_size - 1

    def append(self, features: Tensor) -> None:
        """Features [n, K·H] of the next n positions become context."""
        end = self.length + features.shape[0]
        if end > self._buffer.shape[2]:
            self._grow(max(end, 2 * self._buffer.shape[2]))
        positions = torch.arange(self.length, end, device=features.device)
        pairs = self._drafter.context_keys_values(self._drafter.context(features), positions)
        for layer, pair in enumerate(pairs):
            for kind, rows in enumerate(pair):
                self._buffer[kind, layer, self.length : end] = rows
        self.length = end

    def logits(self, bonus: int, slots: int) -> Tensor:
        """Logits [slots, V] of the first `slots` drafted tokens behind the bonus token, which stands at `length`.

        The block is always the whole one the drafter was trained on, however few slots are wanted.
        """
        spec = self._spec
        if slots == 0:
            return self._head.new_empty(0, self._head.shape[0])
        tokens = torch.full((spec.block_size,), spec.mask_token_id, dtype=torch.long, device=self._embedding.device)
        tokens[0] = bonus
        positions = self.length + torch.arange(spec.block_size, device=tokens.device)
        context = [self._context(layer) for layer in range(spec.layers)]
        attend = block_attend(spec, tokens, self.length)
        hidden = self._drafter(self._embedding[tokens], positions, context, attend)
        logits: Tensor = hidden[1 : slots + 1] @ self._head.T
        return logits

    def _context(self, layer: int) -> KeyValues:
        start = first_seen(self._spec.window(layer), self.length)
        keys, values = self._buffer[:, layer, start : self.length]
        return keys, values

    def _grow(self, capacity: int) -> None:
        shape = list(self._buffer.shape)
        shape[2] = capacity
        wider = self._buffer.new_empty(shape)
        wider[:, :, : self.length] = self._buffer[:, :, : self.length]
        self._buffer = wider


def first_seen(window: int | None, position: int) -> int:
    """First context position that any slot of a block at `position` sees: slot 0 reaches furthest back."""
    return 0 if window is None else max(0, position - window + 1)


def block_attend(spec: DrafterSpec, tokens: Tensor, position: int) -> Attend:
    """Attention of one block [B] at `position` over the context kept by `Proposer`, under the mask of training."""
    per_layer = attention.kinds(spec)
    masks = {kind: block_mask(tokens, position, *kind) for kind in set(per_layer)}
    return lambda layer, q, k, v: attention.attention(q, k, v, masks[per_layer[layer]])


def block_mask(tokens: Tensor, position: int, window: int | None, causal: bool) -> Tensor | None:
    """[B, n + B] bool, the rule of `attention.visible`; None where every slot sees everything."""
    if window is None and not causal:
        return None
    start = first_seen(window, position)
    context_positions = torch.arange(start, position, device=tokens.device)
    positions = position + torch.arange(tokens.shape[0], device=tokens.device)
    zero = torch.zeros(1, dtype=torch.long, device=tokens.device)
    empty = torch.zeros_like(tokens)[None]
    block = Blocks(zero + (position - start), tokens[None], positions[None], zero, empty, empty.float())
    documents = torch.zeros_like(context_positions)
    return attention.visible(block, documents, context_positions, window=window, causal=causal)
