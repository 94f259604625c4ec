"""Cross-entropy through the frozen head at fixed shapes: what `loss.linear_cross_entropy` computes, made for CUDA.

The supervised rows are gathered on the device into a fixed capacity, so neither a shape nor the host depends on how
many there are, and the whole can be captured in a CUDA graph. Per chunk: two products with the head and one kernel that
turns the logits into their gradient, in place or in fp8.

Legend: R rows (all draft tokens), H hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from draftmill.drafter.fp8 import Fp8Head
from draftmill.drafter.kernels.cross_entropy import cross_entropy_
from draftmill.drafter.loss import RowStatistics


class HeadProduct(Protocol):
    """The two products with the head [V, H]; the seam for another precision."""

    def logits(self, rows: Tensor, out: Tensor) -> None:
        """out [C, V] = rows [C, H] · headᵀ."""

    def gradient(self, grad_logits: Tensor) -> Tensor:
        """[C, V] → [C, H]: grad_logits · head."""


@dataclass(frozen=True, slots=True)
class PlainHead:
    """Both products in the head's own dtype."""

    head: Tensor

    def logits(self, rows: Tensor, out: Tensor) -> None:
        torch.mm(rows, self.head.T, out=out)

    def gradient(self, grad_logits: Tensor) -> Tensor:
        return grad_logits @ self.head


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        chunks: list[slice],
        by: HeadProduct | Fp8Head,
    ) -> tuple[Tensor, Tensor, Tensor]:
        chosen, fit = _choose(weights, chunks[-1].stop)
        own_labels, own_weights = labels[chosen], weights[chosen]
        own_nll, own_rank = torch.empty_like(own_weights), torch.empty_like(own_labels)
        logits = _buffer(chunks[0].stop, head)
        gradient = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        for part in chunks:
            rows, out = chosen[part], logits[: part.stop - part.start]
            by.logits(hidden[rows], out)
            row_tensors = own_labels[part], own_weights[part], own_nll[part], own_rank[part]
            if gradient is None:
                cross_entropy_(out, *row_tensors, gradient=False)
            else:
                gradient.index_copy_(0, rows, _gradient(by, out, *row_tensors))
        if gradient is not None:
            ctx.save_for_backward(gradient, fit)
        nll = torch.zeros_like(weights).index_copy_(0, chosen, own_nll)
        rank = torch.zeros_like(labels).index_copy_(0, chosen, own_rank)
        ctx.mark_non_differentiable(nll, rank)
        return (own_nll * own_weights).sum() * fit, nll, rank

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        gradient, fit = ctx.saved_tensors
        return gradient * (grad_loss * fit).to(gradient.dtype), None, None, None, None, None


def _gradient(
    by: HeadProduct | Fp8Head, logits: Tensor, labels: Tensor, weights: Tensor, nll: Tensor, rank: Tensor
) -> Tensor:
    """The gradient of a chunk's hidden states [C, H], and its statistics as `cross_entropy_`. Uses up the logits."""
    if isinstance(by, Fp8Head):
        grad_logits = by.gradient_buffer(logits.shape[0])
        cross_entropy_(logits, labels, weights, nll, rank, apart=grad_logits)
        return by.gradient(grad_logits, labels)
    cross_entropy_(logits, labels, weights, nll, rank)
    return by.gradient(logits)


def _buffer(rows: int, head: Tensor) -> Tensor:
    """[rows, V] like the head; rows start at multiples of 16 elements, which products and kernel need to be fast."""
    vocabulary = head.shape[0]
    return head.new_empty(rows, -(-vocabulary // 16) * 16)[:, :vocabulary]


def _choose(weights: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Rows whose weight is not 0, in order, then others up to the capacity; and 1.0, or NaN if some had no place."""
    idle = weights == 0
    chosen = torch.argsort(idle.byte(), stable=True)[:capacity]
    surplus = (~idle).sum() > capacity
    return chosen, weights.new_ones(()).masked_fill_(surplus, torch.nan)


def fused_linear_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    rows: int,
    chunk_rows: int,
    head_product: HeadProduct | Fp8Head | None = None,
) -> tuple[Tensor, RowStatistics]:
    """Σ_r w_r · (−log softmax(head · hidden_r)[label_r]), not normalised, and per-row statistics [R], 0 where w = 0.

    hidden [R, H] and head [V, H] (frozen: no gradient) of the same dtype, bf16 or fp32; labels [R] int64; weights [R]
    fp32. The scalar is fp32; its gradient reaches `hidden` only and is exactly 0 in rows of weight 0, whose labels are
    never read and whose logits, where they are computed at all, have no effect.

    rows: capacity, an upper bound of the number of rows with weight ≠ 0 known beforehand, such as N·(B−1); the time is
    that of a full capacity. If there are more, loss and gradient are NaN: no row is lost unseen. head_product: how to
    multiply with the head; default plain matmul. Peak extra memory: one chunk of chunk_rows × V (with an Fp8Head also
    one of bytes), the gradient of `hidden` and, in the backward pass, its scaled copy. ValueError if rows or chunk_rows
    is not positive.
    """
    if rows < 1 or chunk_rows < 1:
        raise ValueError(f"rows and chunk_rows must be positive, got {rows} and {chunk_rows}")
    capacity = min(rows, hidden.shape[0])
    chunks = [slice(start, min(start + chunk_rows, capacity)) for start in range(0, capacity, chunk_rows)]
    if not torch.is_grad_enabled():
        hidden = hidden.detach()  # then nobody asks for the gradient
    by = head_product or PlainHead(head)
    loss, nll, rank = _FusedLinearCrossEntropy.apply(hidden, head, labels, weights, chunks, by)  # type: ignore[no-untyped-call]
    return loss, RowStatistics(nll, rank)
