"""Metrics from the same logits as the loss, as sums on the device: they cross to the host once per logging interval.

Legend: N anchors, B block size. Sums add over micro-steps and ranks; `summarise` divides at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOP_KS = (1, 4, 8)
# rows of Sums.slots
_COUNT, _NLL, _REACHED, _REACHED_HIT, _TOP = 0, 1, 2, 3, 4
# entries of Sums.totals
_LOSS, _WEIGHT, _ACCEPTED, _BLOCKS = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Sums:
    """slots [4 + 3, B] fp64: per slot supervised labels, Σ nll, labels whose prefix was right, hits among those,
    and top-1/4/8 hits. totals [4] fp64: Σ w·nll, Σ w, Σ (leading right slots + 1), blocks."""

    slots: Tensor
    totals: Tensor

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.slots + other.slots, self.totals + other.totals)


def zero_sums(block_size: int, device: torch.device | str = "cpu") -> Sums:
    slots = torch.zeros(_TOP + len(TOP_KS), block_size, dtype=torch.float64, device=device)
    return Sums(slots, torch.zeros(4, dtype=torch.float64, device=device))


def block_sums(nll: Tensor, rank: Tensor, weights: Tensor, real: Tensor) -> Sums:
    """Sums of one batch. nll [N, B] fp32 and rank [N, B] int64 (any value where unsupervised), weights [N, B] fp32
    (0 = unsupervised), real [N] bool (False = padding anchor).

    A block cut by the document's end counts only the slots it has.
    """
    counted = weights > 0
    top = [(rank < k) & counted for k in TOP_KS]
    hit = top[0].clone()
    hit[:, 0] = real  # the bonus token is always right
    leading = hit.long().cumprod(dim=1)  # 1 while every slot up to here is right
    reached = torch.cat((torch.zeros_like(leading[:, :1]), leading[:, :-1]), dim=1).bool() & counted
    rows = [counted, nll.masked_fill(~counted, 0.0), reached, reached & top[0], *top]
    slots = torch.stack([row.double().sum(0) for row in rows])
    loss = (nll * weights).masked_fill(~counted, 0.0).double().sum()
    totals = torch.stack((loss, weights.double().sum(), leading.double().sum(), real.double().sum()))
    return Sums(slots, totals)


def summarise(sums: Sums) -> dict[str, float | list[float]]:
    """Plain numbers for the log. Lists run over slots 1 … B−1; a slot that never occurred gives 0.

    loss: Σ w·nll / Σ w. accuracy: top-1 over all supervised slots. tau: mean over blocks of (leading right slots + 1),
    the mean of per-block products, not the product of means.
    """
    slots, totals = sums.slots.cpu(), sums.totals.cpu()
    count = slots[_COUNT, 1:]

    def ratio(part: Tensor, whole: Tensor) -> list[float]:
        return [float(x) for x in (part / whole.clamp_min(1.0))]

    result: dict[str, float | list[float]] = {
        "loss": float(totals[_LOSS] / totals[_WEIGHT]) if totals[_WEIGHT] > 0 else 0.0,
        "accuracy": float(slots[_TOP, 1:].sum() / count.sum().clamp_min(1.0)),
        "tau_teacher_forced": float(totals[_ACCEPTED] / totals[_BLOCKS].clamp_min(1.0)),
        "blocks": float(totals[_BLOCKS]),
        "slot_loss": ratio(slots[_NLL, 1:], count),
        "slot_acceptance": ratio(slots[_REACHED_HIT, 1:], slots[_REACHED, 1:]),
    }
    for offset, k in enumerate(TOP_KS):
        result[f"slot_top{k}"] = ratio(slots[_TOP + offset, 1:], count)
    return result
