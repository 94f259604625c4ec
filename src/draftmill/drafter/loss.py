"""Cross-entropy through the frozen head in row chunks: the logits of the whole batch never exist.

One pass over each chunk gives loss, gradient, log-sum-exp and the rank of the label; the head's weight gradient is
never computed. The gradient is made in the forward pass, so nothing of a chunk outlives it.

Legend: R rows (supervised draft tokens), H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowStatistics:
    """Per row, detached. nll [R] fp32: −log q(label). rank [R] int64: how many tokens the drafter prefers to it."""

    nll: Tensor
    rank: Tensor


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, chunk_rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden.shape[0]
        nll = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        rank = torch.empty(rows, dtype=torch.int64, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, rows, chunk_rows):
            part = slice(start, min(start + chunk_rows, rows))
            logits = hidden[part] @ head.T
            rank[part] = label_rank(logits, labels[part])
            logp = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
            nll[part] = -logp.gather(-1, labels[part, None]).squeeze(-1)
            if gradient is not None:
                gradient[part] = _logit_gradient(logp, labels[part], weights[part]).to(head.dtype) @ head
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(nll, rank)
        return (nll * weights).sum(), nll, rank

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss.to(gradient.dtype), None, None, None, None


def _logit_gradient(logp: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """d(Σ w·nll)/d(logits) = w·(softmax − onehot). Overwrites logp."""
    gradient = logp.exp_().mul_(weights[:, None])
    return gradient.scatter_add_(-1, labels[:, None], -weights[:, None])


def label_rank(logits: Tensor, labels: Tensor) -> Tensor:
    """[R, V], [R] → [R] int64: number of tokens an arg-max or top-k would take before the label.

    Ties go to the lower id, as in `argmax`: with bf16 logits they are common, and a label that only ties for the top
    would not be drafted.
    """
    own = logits.gather(-1, labels[:, None])
    above = (logits > own).sum(-1)
    ties = (logits == own).nonzero()
    earlier = ties[:, 1] < labels[ties[:, 0]]
    return above.index_add(0, ties[:, 0], earlier.long())


def linear_cross_entropy(
    hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, *, chunk_rows: int
) -> tuple[Tensor, RowStatistics]:
    """Σ_r w_r · (−log softmax(head · hidden_r)[label_r]), not normalised, and per-row statistics.

    hidden [R, H], head [V, H] (frozen: no gradient), labels [R] int64, weights [R] fp32. The scalar is fp32; its
    gradient reaches `hidden` only. Peak extra memory: 2 chunks of chunk_rows × V.
    """
    loss, nll, rank = _LinearCrossEntropy.apply(hidden, head, labels, weights, chunk_rows)  # type: ignore[no-untyped-call]
    return loss, RowStatistics(nll, rank)
