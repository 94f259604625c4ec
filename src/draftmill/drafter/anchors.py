"""Anchors: the positions whose next tokens a block learns to draft.

Legend: T tokens in the batch, N anchors.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

PADDING_ANCHOR = -1


def valid_anchors(loss_mask: Tensor, document_ids: Tensor) -> Tensor:
    """Positions p at which a block may start.

    loss_mask [T] bool, document_ids [T] int → [V] int64, increasing. A position is valid when it and its successor
    are in the loss mask and in the same document: the bonus token is one the target produced, and slot 1 has a label.
    """
    pair = loss_mask[:-1] & loss_mask[1:] & (document_ids[:-1] == document_ids[1:]) & (document_ids[:-1] >= 0)
    return pair.nonzero().squeeze(-1)


def draw_anchors(valid: Tensor, count: int, *, seed: int, epoch: int, index: int) -> Tensor:
    """Draw `count` anchors without replacement, uniformly over all valid positions of the batch.

    valid [V] int64 → [count] int64, increasing, padded at the end with −1 where V < count. The draw is a pure function
    of (seed, epoch, index): a counter-based generator (Philox) keyed by them, so it depends neither on the process nor
    on the device nor on how often the run was stopped.
    """
    keys = np.array([seed & 0xFFFFFFFFFFFFFFFF, (epoch << 40) ^ index], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=keys))
    take = min(count, len(valid))
    chosen = np.sort(generator.permutation(len(valid))[:take])
    anchors = valid.new_full((count,), PADDING_ANCHOR)
    anchors[:take] = valid[valid.new_tensor(chosen)]
    return anchors
