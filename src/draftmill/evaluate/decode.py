"""Speculative decoding of one sequence with key/value caches on both sides (arXiv 2602.06036).

A block at position p is [bonus, MASK × (B−1)]: the bonus token is known, its hidden state is not, so the drafter sees
the features of positions before p only. The target runs over bonus and drafted tokens at once and accepts a prefix.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from draftmill.drafter.model import Drafter
from draftmill.evaluate.draft import Proposer
from draftmill.evaluate.sampling import draw, probabilities, verify_greedy, verify_sampled
from draftmill.evaluate.target import CachedTarget
from draftmill.target.model import shared_matrices


@dataclass(frozen=True, slots=True)
class Block:
    """One drafted block. Tokens behind a stop token were never needed and count nowhere.

    start     position of the bonus token in the whole sequence, prompt included
    proposals drafted tokens that were put before the target; fewer than B−1 where little was left to produce
    accepted  how many of them, from the first on, stand in the answer
    produced  tokens the block added to the answer: accepted + 1, or accepted where the last of them is a stop token
    """

    start: int
    proposals: tuple[int, ...]
    accepted: int
    produced: int

    @property
    def drafted(self) -> int:
        return len(self.proposals)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall time. prefill includes the first token; verify includes rolling the target back."""

    prefill: float
    draft: float
    verify: float

    @property
    def total(self) -> float:
        return self.prefill + self.draft + self.verify


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer and how it came about. The first token comes from the prefill, all others from blocks."""

    tokens: tuple[int, ...]
    blocks: tuple[Block, ...]
    seconds: Seconds

    @property
    def accepted(self) -> tuple[int, ...]:
        """Drafted tokens accepted, per block."""
        return tuple(block.accepted for block in self.blocks)


class _Clock:
    """Adds up wall time; on CUDA it waits for the device at each reading."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._last = device, 0.0
        self.lap()

    def lap(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        return passed


@dataclass(frozen=True, slots=True)
class Sampler:
    """How tokens are chosen. temperature 0: greedy, and no generator is needed."""

    temperature: float = 0.0
    generator: torch.Generator | None = field(default=None)

    def first(self, logits: Tensor) -> int:
        """The token behind the prompt: logits [V]."""
        if self.generator is None:
            return int(logits.argmax())
        return int(draw(probabilities(logits[None], self.temperature), self.generator))

    def propose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Draft logits [k, V] → tokens [k] and, when sampling, the distributions they were drawn from [k, V]."""
        if self.generator is None:
            return logits.argmax(dim=-1), None
        probs = probabilities(logits, self.temperature)
        return draw(probs, self.generator), probs

    def verify(self, drafted: Tensor, draft_probs: Tensor | None, target_logits: Tensor) -> tuple[int, int]:
        """(accepted, next token) for drafted [k] and target logits [k + 1, V]."""
        if self.generator is None or draft_probs is None:
            return verify_greedy(drafted, target_logits)
        return verify_sampled(drafted, draft_probs, probabilities(target_logits, self.temperature), self.generator)


def make_sampler(temperature: float, seed: int, device: torch.device) -> Sampler:
    if temperature == 0:
        return Sampler()
    return Sampler(temperature, torch.Generator(device).manual_seed(seed))


@torch.no_grad()
def decode(
    model: nn.Module,
    drafter: Drafter,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> Decoded:
    """Continue input_ids [n ≥ 1] int64 by up to max_new_tokens ≥ 1 tokens, ending behind the first stop id.

    `model` is a Hugging Face causal language model; `drafter` lies on its device and computes in its dtype. Greedy
    output is the target's own greedy output; at a temperature the tokens are distributed as the target's own.
    """
    sampler = make_sampler(temperature, seed, input_ids.device)
    embedding, head = shared_matrices(model)
    proposer = Proposer(drafter, embedding, head, capacity=len(input_ids) + max_new_tokens)
    clock, stops = _Clock(input_ids.device), frozenset(stop_ids)
    draft_seconds = verify_seconds = 0.0
    with CachedTarget(model, drafter.spec.taps) as target:
        logits, features = target.prefill(input_ids)
        tokens, blocks = [sampler.first(logits)], []
        prefill_seconds = clock.lap()
        while len(tokens) < max_new_tokens and tokens[-1] not in stops:
            assert features is not None
            proposer.append(features)
            drafted, probs = _propose(proposer, sampler, tokens[-1], max_new_tokens - len(tokens) - 1)
            draft_seconds += clock.lap()
            logits, features = target.block(torch.cat((drafted.new_tensor(tokens[-1:]), drafted)))
            accepted, bonus = sampler.verify(drafted, probs, logits)
            target.keep(accepted + 1)
            features = features[: accepted + 1] if features is not None else None
            block = _settle(proposer.length, drafted.tolist(), accepted, bonus, stops)
            blocks.append(block)
            tokens += [*block.proposals[:accepted], bonus][: block.produced]
            verify_seconds += clock.lap()
    return Decoded(tuple(tokens), tuple(blocks), Seconds(prefill_seconds, draft_seconds, verify_seconds))


def _propose(proposer: Proposer, sampler: Sampler, bonus: int, wanted: int) -> tuple[Tensor, Tensor | None]:
    """At most `wanted` drafted tokens: the target's own token behind them completes the answer."""
    slots = min(proposer.slots, wanted)
    return sampler.propose(proposer.logits(bonus, slots))


def _settle(start: int, drafted: list[int], accepted: int, bonus: int, stops: frozenset[int]) -> Block:
    """The block's record, cut behind the first stop token."""
    produced = [*drafted[:accepted], bonus]
    stop = next((place for place, token in enumerate(produced) if token in stops), accepted)
    if stop < accepted:  # a drafted token stops the answer
        return Block(start, tuple(drafted[: stop + 1]), stop + 1, stop + 1)
    return Block(start, tuple(drafted), accepted, accepted + 1)
