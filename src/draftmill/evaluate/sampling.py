"""Verifying a draft: which drafted tokens stand, and the token behind them. Pure tensors.

Legend: k drafted tokens, V vocabulary. Target logits [k + 1, V]: row i is the distribution of drafted token i, the last
row that of the token behind them all.
"""

from __future__ import annotations

import torch
from torch import Tensor


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) in fp32 over the last dimension."""
    return torch.softmax(logits.float() / temperature, dim=-1)


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row: [k, V] → [k] int64."""
    return torch.multinomial(probs, 1, generator=generator).squeeze(-1)


def verify_greedy(drafted: Tensor, target_logits: Tensor) -> tuple[int, int]:
    """(accepted, next token): the longest prefix of drafted [k] that is the target's arg-max, and its token behind."""
    best = target_logits.argmax(dim=-1)
    right = (drafted == best[:-1]).long().cumprod(dim=0)
    accepted = int(right.sum())
    return accepted, int(best[accepted])


def verify_sampled(
    drafted: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator
) -> tuple[int, int]:
    """(accepted, next token) such that the tokens are distributed as if the target had drawn each of them.

    drafted [k], each drawn from its row of draft_probs q [k, V]; target_probs p [k + 1, V]. Token x stands with
    probability min(1, p(x)/q(x)); the first that falls is drawn anew from max(p − q, 0), normalised; behind the last
    one from p. Source: speculative sampling, arXiv 2211.17192, theorem 1.
    """
    rows = torch.arange(drafted.shape[0], device=drafted.device)
    p, q = target_probs[rows, drafted], draft_probs[rows, drafted]
    uniform = torch.rand(q.shape, generator=generator, device=q.device, dtype=q.dtype)
    accepted = int((uniform * q < p).long().cumprod(dim=0).sum())
    if accepted == drafted.shape[0]:
        return accepted, int(draw(target_probs[-1:], generator))
    left = residual(target_probs[accepted], draft_probs[accepted])
    return accepted, int(draw(left[None], generator))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p − q, 0), normalised. Where p = q to rounding nothing is left and p itself is right: [V] → [V]."""
    left = (p - q).clamp_min(0)
    total = left.sum()
    return torch.where(total > 0, left / total, p)
