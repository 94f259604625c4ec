"""One micro-step: a batch of hidden states → accumulated gradients and metric sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftmill.drafter.anchors import draw_anchors, valid_anchors
from draftmill.drafter.attention import by_document, trim_padding
from draftmill.drafter.blocks import Blocks, make_blocks
from draftmill.drafter.memory import Fp8Use
from draftmill.drafter.metrics import Sums, zero_sums
from draftmill.drafter.model import Drafter
from draftmill.drafter.objective import block_loss
from draftmill.records import HiddenBatch


@dataclass(frozen=True, slots=True)
class StepSettings:
    """anchors: N per batch. gamma: of the slot weights. dtype: of the drafter's arithmetic. fused_rows: T, if the step
    is to be that of `fused_step`, for a GPU, in place of the plain one here. fp8: as in `TrainConfig`, fused only."""

    anchors: int
    gamma: float
    seed: int
    dtype: torch.dtype
    fused_rows: int | None = None
    fp8: Fp8Use = "none"


class Step(Protocol):
    """A micro-step, however it is computed. The gradients are the parameters' own .grad."""

    def __call__(self, batch: HiddenBatch) -> Sums:
        """Add the gradient of the batch's Σ w·CE; return the batch's sums, on the device, which may be overwritten by
        the next call."""

    def updated(self) -> None:
        """The weights have changed."""

    def clear(self) -> None:
        """Begin anew: the gradients collected so far are not needed any more."""

    def describe(self) -> str:
        """For the console: how the step is computed."""


class PlainStep:
    """`micro_step` as a `Step`."""

    def __init__(
        self, drafter: Drafter, embedding: Tensor, head: Tensor, settings: StepSettings, *, always_run: bool
    ) -> None:
        self._drafter, self._embedding, self._head = drafter, embedding, head
        self._settings, self._always_run = settings, always_run

    def __call__(self, batch: HiddenBatch) -> Sums:
        return micro_step(
            self._drafter,
            batch,
            embedding=self._embedding,
            head=self._head,
            settings=self._settings,
            always_run=self._always_run,
        )

    def updated(self) -> None:
        pass

    def clear(self) -> None:
        self._drafter.zero_grad(set_to_none=True)

    def describe(self) -> str:
        return "plain, document by document"


def make_step(
    drafter: Drafter, embedding: Tensor, head: Tensor, settings: StepSettings, *, always_run: bool = False
) -> Step:
    """embedding, head [V, H] on the drafter's device; any dtype. always_run as in `micro_step`."""
    embedding, head = (matrix.to(settings.dtype) for matrix in (embedding, head))
    if settings.fused_rows is not None:
        from draftmill.train.fused_step import FusedStep

        return FusedStep(drafter, embedding, head, settings).prepare()
    return PlainStep(drafter, embedding, head, settings, always_run=always_run)


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
