"""Blocks: what each anchor's block holds, where its slots stand, which tokens they learn and with what weight.

Legend: T context tokens, N anchors, B block size. Slot k of the block at anchor p predicts the token at p + k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """The draft side of one batch.

    anchors      [N]    int64  increasing; −1 = padding anchor (attends to nothing but itself, has no weight)
    tokens       [N, B] int64  slot 0 = the anchor's token, slots 1 … B−1 = MASK
    position_ids [N, B] int64  position of the anchor in its document + slot
    document_ids [N]    int64  document of the anchor; −1 for a padding anchor
    labels       [N, B] int64  token at p + slot, 0 where there is none
    weights      [N, B] fp32   exp(−(k−1)/γ) for supervised slots k ≥ 1, else 0
    """

    anchors: Tensor
    tokens: Tensor
    position_ids: Tensor
    document_ids: Tensor
    labels: Tensor
    weights: Tensor

    def to(self, device: torch.device | str) -> Blocks:
        return Blocks(*(tensor.to(device) for tensor in self.tensors()))

    def select(self, rows: slice) -> Blocks:
        """Some of the blocks."""
        return Blocks(*(tensor[rows] for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.anchors, self.tokens, self.position_ids, self.document_ids, self.labels, self.weights


def default_gamma(block_size: int) -> float:
    """γ of the slot decay: 7 / 5 / 4 for blocks of 16 / 10 / 8 (arXiv 2602.06036), linear in between and beyond."""
    known = {16: 7.0, 10: 5.0, 8: 4.0}
    return known.get(block_size, max(1.0, 4.0 + (block_size - 8) * 3.0 / 8.0))


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """[B] fp32: 0 for slot 0, then w_k = exp(−(k−1)/γ)."""
    slots = torch.arange(block_size, dtype=torch.float32)
    weights = torch.exp(-(slots - 1) / gamma)
    weights[0] = 0.0
    return weights


def make_blocks(
    input_ids: Tensor,
    loss_mask: Tensor,
    position_ids: Tensor,
    document_ids: Tensor,
    anchors: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    gamma: float,
) -> Blocks:
    """Build the blocks of a batch: four [T] tensors and [N] anchors → `Blocks` on the same device, fixed shapes.

    A slot past the document's end, or whose label is not in the loss mask, gets weight 0, and so does every slot behind
    it: a short tail still trains, a block never learns the tokens of the next document, and never those of a later
    turn, which no draft could know without the user's words in between.
    """
    if not (math.isfinite(gamma) and gamma > 0):
        raise ValueError(f"gamma must be positive, got {gamma}")
    total = input_ids.shape[0]
    real = anchors >= 0
    at = anchors.clamp_min(0)
    places = at[:, None] + torch.arange(block_size, device=at.device)  # (N, B) positions in the batch
    inside = places < total
    places = places.clamp_max(total - 1)
    documents = torch.where(real, document_ids[at].long(), -1)
    supervised = inside & loss_mask[places] & (document_ids[places].long() == documents[:, None]) & real[:, None]
    supervised[:, 0] = real
    supervised = supervised.long().cumprod(dim=1).bool()
    tokens = torch.full(places.shape, mask_token_id, dtype=torch.long, device=at.device)
    tokens[:, 0] = input_ids[at].long()
    weights = supervised * slot_weights(block_size, gamma).to(at.device)
    labels = torch.where(supervised, input_ids[places].long(), 0)
    positions = position_ids[at].long()[:, None] + torch.arange(block_size, device=at.device)
    return Blocks(anchors, tokens, positions, documents, labels, weights)
