"""The update: learning rate, normalisation, clipping, AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from draftmill.train.config import TrainConfig
from draftmill.train.parallel import as_whole


def learning_rate(step: int, total: int, peak: float, warmup_ratio: float) -> float:
    """Rate of 0-based optimizer step `step` of `total`: linear warm-up, then a cosine to zero."""
    warmup = max(1, round(total * warmup_ratio))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over fp32 master weights; norms carry no weight decay."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def apply_update(
    parameters: list[nn.Parameter], optimizer: torch.optim.AdamW, *, weight: Tensor, lr: float, clip: float
) -> tuple[float, bool]:
    """One update from accumulated gradients of Σ w·CE. Returns (gradient norm, whether the update was made).

    The gradient is divided once by `weight`, the Σ w of the whole optimizer step, so it does not depend on how anchors
    fell over micro-steps or ranks. With Σ w = 0 there is nothing to learn and no update. A non-finite gradient changes
    nothing. Gradients are cleared in every case.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = float(weight)
    done, norm = False, 0.0
    if gradients and total > 0:
        torch._foreach_div_(gradients, total)
        norm = float(as_whole(nn.utils.clip_grad_norm_(parameters, clip)))
        done = math.isfinite(norm)
    if done:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, done
