"""The target alone, one token per forward pass: the reference for losslessness and for speed."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from draftmill.evaluate.decode import make_sampler
from draftmill.evaluate.target import CachedTarget


@dataclass(frozen=True, slots=True)
class Plain:
    """tokens: the answer, ending behind the first stop id. seconds: wall time, prefill included."""

    tokens: tuple[int, ...]
    seconds: float


@torch.no_grad()
def plain(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> Plain:
    """Continue input_ids [n] int64 by up to max_new_tokens tokens: greedy by `generate`, else by sampling."""
    _wait(input_ids.device)
    start = time.perf_counter()
    if temperature == 0:
        tokens = _greedy(model, input_ids, max_new_tokens, stop_ids)
    else:
        tokens = _sampled(model, input_ids, max_new_tokens, frozenset(stop_ids), temperature, seed)
    _wait(input_ids.device)
    return Plain(tuple(tokens), time.perf_counter() - start)


def _greedy(model: nn.Module, input_ids: Tensor, max_new_tokens: int, stop_ids: Collection[int]) -> list[int]:
    """The attention mask is explicit: `generate` would mask every token that equals the pad id."""
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(stop_ids) or None, pad_token_id=0
    )
    ids = input_ids[None]
    with _only(model, settings):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)  # type: ignore[operator]
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


@contextmanager
def _only(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Without the checkpoint's own generation settings: `generate` would fill every field left open from them, a
    repetition penalty for example, and the answer would not be the arg-max any more."""
    own = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = own


def _sampled(
    model: nn.Module, input_ids: Tensor, max_new_tokens: int, stops: frozenset[int], temperature: float, seed: int
) -> list[int]:
    sampler = make_sampler(temperature, seed, input_ids.device)
    with CachedTarget(model) as target:
        logits, _ = target.prefill(input_ids)
        tokens = [sampler.first(logits)]
        while len(tokens) < max_new_tokens and tokens[-1] not in stops:
            block, _ = target.block(input_ids.new_tensor(tokens[-1:]))
            target.keep(1)
            tokens.append(sampler.first(block[-1]))
    return tokens


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
