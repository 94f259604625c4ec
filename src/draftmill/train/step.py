"""One micro-step: a batch of hidden states → accumulated gradients and metric sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftmill.drafter.anchors import draw_anchors, valid_anchors
from draftmill.drafter.attention import by_document, trim_padding
from draftmill.drafter.blocks import Blocks, make_blocks
from draftmill.drafter.metrics import Sums, zero_sums
from draftmill.drafter.model import Drafter
from draftmill.drafter.objective import block_loss
from draftmill.records import HiddenBatch


@dataclass(frozen=True, slots=True)
class StepSettings:
    """anchors: N per batch. gamma: of the slot weights. dtype: of the drafter's arithmetic."""

    anchors: int
    gamma: float
    seed: int
    dtype: torch.dtype


def batch_blocks(batch: HiddenBatch, drafter: Drafter, settings: StepSettings) -> Blocks:
    """The batch's blocks, anchors drawn by (seed, epoch, bin): the same whoever asks and however often."""
    tokens = batch.tokens
    valid = valid_anchors(tokens.loss_mask, tokens.document_ids)
    anchors = draw_anchors(valid, settings.anchors, seed=settings.seed, epoch=tokens.epoch, index=tokens.bin)
    return make_blocks(
        tokens.input_ids,
        tokens.loss_mask,
        tokens.position_ids,
        tokens.document_ids,
        anchors,
        block_size=drafter.spec.block_size,
        mask_token_id=drafter.spec.mask_token_id,
        gamma=settings.gamma,
    )


def weightless_block(batch: HiddenBatch, drafter: Drafter, settings: StepSettings) -> Blocks:
    """One block at the first token of the batch, without supervision: its gradients are exact zeros."""
    tokens = batch.tokens
    return make_blocks(
        tokens.input_ids,
        torch.zeros_like(tokens.loss_mask),
        tokens.position_ids,
        tokens.document_ids,
        torch.zeros(1, dtype=torch.long),
        block_size=drafter.spec.block_size,
        mask_token_id=drafter.spec.mask_token_id,
        gamma=settings.gamma,
    )


def micro_step(
    drafter: Drafter,
    batch: HiddenBatch,
    *,
    embedding: Tensor,
    head: Tensor,
    settings: StepSettings,
    always_run: bool = False,
) -> Sums:
    """Add the gradient of the batch's Σ w·CE to the parameters' .grad; return the batch's sums.

    A batch without a valid anchor adds nothing and is no error. always_run: it goes through forward and backward all
    the same, with a block that weighs nothing, because other ranks wait for this one in their layers.
    """
    blocks = trim_padding(batch_blocks(batch, drafter, settings))
    nothing = not bool((blocks.weights > 0).any())
    if nothing and not always_run:
        return zero_sums(drafter.spec.block_size, batch.features.device)
    features = batch.features
    if nothing:  # whatever its states are, even NaN: 0 · NaN is not zero
        blocks, features = weightless_block(batch, drafter, settings), torch.zeros_like(features)
    blocks = blocks.to(batch.features.device)
    document_ids = batch.tokens.document_ids.to(batch.features.device)
    position_ids = batch.tokens.position_ids.to(batch.features.device)
    attend = by_document(drafter.spec, blocks, document_ids, position_ids)
    loss, sums = block_loss(
        drafter,
        features.to(settings.dtype),
        position_ids,
        blocks,
        embedding=embedding,
        head=head,
        attend=attend,
        chunk_rows=256 if batch.features.device.type == "cpu" else 2048,
    )
    loss.backward()
    return zero_sums(drafter.spec.block_size, batch.features.device) if nothing else sums
