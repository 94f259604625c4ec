"""From hidden states and blocks to the loss of one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from draftmill.drafter.blocks import Blocks
from draftmill.drafter.loss import linear_cross_entropy
from draftmill.drafter.metrics import Sums, block_sums
from draftmill.drafter.model import Attend, Drafter


def block_hidden(
    drafter: Drafter, features: Tensor, position_ids: Tensor, blocks: Blocks, embedding: Tensor, attend: Attend
) -> Tensor:
    """Hidden states of all draft tokens: features [T, K·H], position_ids [T], embedding [V, H] → [N, B, H]."""
    embedded = embedding[blocks.tokens.flatten()]
    hidden = drafter.train_forward(features, position_ids, embedded, blocks.position_ids.flatten(), attend)
    return hidden.view(*blocks.tokens.shape, -1)


def block_loss(
    drafter: Drafter,
    features: Tensor,
    position_ids: Tensor,
    blocks: Blocks,
    *,
    embedding: Tensor,
    head: Tensor,
    attend: Attend,
    chunk_rows: int,
) -> tuple[Tensor, Sums]:
    """Σ w·CE over all supervised slots (fp32 scalar, not normalised) and the metric sums.

    Rows of slot 0 and unsupervised rows never reach the head. embedding and head [V, H] are the target's, frozen.
    """
    hidden = block_hidden(drafter, features, position_ids, blocks, embedding, attend)
    rows = (blocks.weights > 0).flatten().nonzero().squeeze(-1)
    weights, labels = blocks.weights.flatten()[rows], blocks.labels.flatten()[rows]
    loss, stats = linear_cross_entropy(hidden.flatten(0, 1)[rows], head, labels, weights, chunk_rows=chunk_rows)
    nll = torch.zeros_like(blocks.weights).flatten().index_copy(0, rows, stats.nll).view_as(blocks.weights)
    rank = torch.zeros_like(blocks.labels).flatten().index_copy(0, rows, stats.rank).view_as(blocks.labels)
    return loss, block_sums(nll, rank, blocks.weights, blocks.anchors >= 0)
