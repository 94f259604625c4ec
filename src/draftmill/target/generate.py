"""Answers by the target itself: the on-policy data that drafters learn from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Answer:
    """token_ids without the stop token. finished: the target ended by itself; False: cut at the limit."""

    token_ids: list[int]
    finished: bool


@torch.no_grad()
def answer_batch(
    model: nn.Module,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    stop_ids: Collection[int],
    seed: int,
) -> list[Answer]:
    """Answer all prompts in one batch: left-padded, greedy at temperature 0, else plain sampling seeded with `seed`.

    The checkpoint's generation defaults (penalties, top-p) are not used: the answer is the model's own distribution.
    """
    from transformers import GenerationConfig

    device = next(model.parameters()).device
    width = max(len(prompt) for prompt in prompts)
    pad = min(stop_ids)
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    wanted: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        torch.manual_seed(seed)
        wanted |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=sorted(stop_ids), pad_token_id=pad, use_cache=True, **wanted
    )
    own, model.generation_config = model.generation_config, settings
    try:
        out = model.generate(ids, attention_mask=mask, generation_config=settings)  # type: ignore[operator]
    finally:
        model.generation_config = own
    return [_cut(row[width:].tolist(), stop_ids) for row in out]


def _cut(token_ids: list[int], stop_ids: Collection[int]) -> Answer:
    end = next((place for place, token in enumerate(token_ids) if token in stop_ids), None)
    return Answer(token_ids if end is None else token_ids[:end], end is not None)
