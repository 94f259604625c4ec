"""The update: learning rate, normalisation, clipping, AdamW or Muon."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftmill.train.config import TrainConfig
from draftmill.train.parallel import as_whole, is_shared_out


def learning_rate(step: int, total: int, peak: float, warmup_ratio: float) -> float:
    """Rate of 0-based optimizer step `step` of `total`: linear warm-up, then a cosine to zero."""
    warmup = max(1, round(total * warmup_ratio))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW | MuonAndAdamW:
    """For fp32 master weights; norms carry no weight decay."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim > 1]
    norms = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}
    if config.optimizer == "muon":
        return MuonAndAdamW(
            torch.optim.Muon(matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([norms], lr=config.lr, betas=config.betas, fused=True),
        )
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, norms]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


class MuonAndAdamW:
    """Muon for the matrices, AdamW for the norms, as one optimizer with the groups and state of both.

    Muon's updates are scaled to the size that AdamW's have, so one learning rate serves both (arXiv 2502.16982).
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self._both = (muon, adamw)
        self.param_groups: list[dict[str, Any]] = [*muon.param_groups, *adamw.param_groups]
        self.state = adamw.state = muon.state  # no parameter is in both

    def step(self) -> None:
        for optimizer in self._both:
            optimizer.step()  # type: ignore[no-untyped-call]


Optimizer = torch.optim.Optimizer | MuonAndAdamW


@dataclass(frozen=True, slots=True)
class Update:
    """What came of an update, on the device: nothing waits for it. norm: fp32, of the normalised gradient before
    clipping; 0 where nothing had weight. done: bool, whether the weights were changed."""

    norm: Tensor
    done: Tensor


def apply_update(
    parameters: list[nn.Parameter], optimizer: Optimizer, *, weight: Tensor, lr: float, clip: float
) -> Update:
    """One update from accumulated gradients of Σ w·CE. The gradients stay; their values may change.

    The gradient is divided once by `weight`, the Σ w of the whole optimizer step, so it does not depend on how anchors
    fell over micro-steps or ranks. With Σ w = 0 there is nothing to learn and no update. A non-finite gradient changes
    nothing, neither weights nor moments.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return Update(weight.new_zeros((), dtype=torch.float32), weight.new_zeros((), dtype=torch.bool))
    sum_norm = as_whole(nn.utils.get_total_norm(gradients))
    norm = sum_norm / weight.float()
    done = torch.isfinite(norm) & (weight > 0)
    scale = (clip / (norm + 1e-6)).clamp(max=1.0) / weight.float()
    for group in optimizer.param_groups:
        group["lr"] = lr
    if isinstance(optimizer, torch.optim.AdamW) and not any(is_shared_out(g) for g in gradients):
        _step_on_device(optimizer, scale, done)
    elif bool(done):  # these cannot look at a flag on the device, so the host waits for it
        torch._foreach_mul_(gradients, scale)
        optimizer.step()
    return Update(torch.where(weight > 0, norm, 0.0), done)


def _step_on_device(optimizer: torch.optim.AdamW, scale: Tensor, done: Tensor) -> None:
    """The fused kernel divides by grad_scale and changes nothing where found_inf is not 0."""
    optimizer.grad_scale = 1.0 / scale  # type: ignore[attr-defined]
    optimizer.found_inf = (~done).float()  # type: ignore[attr-defined]
    optimizer.step()
