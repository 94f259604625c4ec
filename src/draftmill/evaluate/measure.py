"""The drafter over a set of prompts: acceptance, speed against the target alone, and whether answers are the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftmill.drafter.model import Drafter
from draftmill.errors import UserError
from draftmill.evaluate.acceptance import Acceptance, acceptance
from draftmill.evaluate.config import EvaluateConfig, resolve_dtype
from draftmill.evaluate.decode import Decoded, decode
from draftmill.evaluate.plain import Plain, plain
from draftmill.evaluate.prompts import read_prompts, render
from draftmill.evaluate.target import rounding
from draftmill.records import Conversation

WARM_UP_TOKENS = 8
OVERALL = "all"
Progress = Callable[[int, int], None]  # prompts done, prompts in all


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where an answer first differs from the target's own.

    row: line of the prompt. position: 0-based, in the answer. token, expected: speculative and plain (None where one
    answer ends). top2_gap: distance of the target's two best logits there; gap: how far `token` lies below the best.
    tie: the gap is within what rounding moves, so both answers are the target's; otherwise it is a fault.
    """

    row: int
    position: int
    token: int | None
    expected: int | None
    top2_gap: float
    gap: float | None
    tie: bool


@dataclass(frozen=True, slots=True)
class Slice:
    """One slice, or all. tokens: produced. identical: answers equal to the target's own; None when sampling.
    Tokens per second are tokens over wall time, prefill included; speed_up is their ratio."""

    name: str
    prompts: int
    tokens: int
    acceptance: Acceptance
    tokens_per_second: float
    plain_tokens_per_second: float
    identical: int | None
    mismatches: tuple[Mismatch, ...]

    @property
    def speed_up(self) -> float:
        return self.tokens_per_second / self.plain_tokens_per_second


@dataclass(frozen=True, slots=True)
class Result:
    """slices: overall first, then one per `source`, in order of appearance. dtype: what it ran in. Case by case, since
    acceptance differs twofold between languages and tasks."""

    dtype: str
    temperature: float
    max_new_tokens: int
    block_size: int
    slices: tuple[Slice, ...]

    @property
    def overall(self) -> Slice:
        return self.slices[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts."""
        values = asdict(self)
        for plain_slice, part in zip(values["slices"], self.slices, strict=True):
            plain_slice["speed_up"] = part.speed_up
        return values


@dataclass(frozen=True, slots=True)
class _Answer:
    prompt: Conversation
    speculative: Decoded
    plain: Plain
    mismatch: Mismatch | None


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    drafter: Drafter,
    config: EvaluateConfig,
    template_kwargs: dict[str, Any],
    *,
    recorded_template_kwargs: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Answer every prompt with and without the drafter.

    model: Hugging Face causal language model on its device; it is cast to the configured dtype in place.
    template_kwargs: arguments of the chat template, e.g. enable_thinking; recorded_template_kwargs: those the drafter
    was trained with, where known. Raises UserError when the two differ, for prompts that cannot be rendered, and for a
    foreign target.
    """
    check_template_kwargs(template_kwargs, recorded_template_kwargs)
    prompts = read_prompts(config.prompts, config.limit)
    rendered = [render(prompt, tokenizer, template_kwargs, config.prompts) for prompt in prompts]
    dtype = resolve_dtype(config.dtype, model)
    model.to(dtype).eval()
    device = next(model.parameters()).device
    drafter = copy.deepcopy(drafter).to(device, dtype).eval()
    stops = stop_ids(model, tokenizer)
    inputs = [torch.tensor(ids, device=device) for ids in rendered]
    _warm_up(model, drafter, inputs[0], config.temperature)
    answers = []
    for number, (prompt, ids) in enumerate(zip(prompts, inputs, strict=True)):
        answers.append(_answer(model, drafter, prompt, ids, config, stops, config.seed + number))
        if progress is not None:
            progress(number + 1, len(prompts))
    return _result(answers, str(dtype).removeprefix("torch."), drafter.spec.block_size, config)


def check_template_kwargs(asked: dict[str, Any], recorded: dict[str, Any] | None) -> None:
    """Prompts rendered otherwise than in training cost half the acceptance, without any other sign."""
    if recorded is not None and asked != recorded:
        raise UserError(
            f"the chat template is asked for with {asked} but the drafter was trained with {recorded}; its acceptance "
            "would be that of another prompt format. Use the same template arguments, or train with these"
        )


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end an answer: those of the target's generation config, and the tokenizer's end of sequence."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None)


def _warm_up(model: nn.Module, drafter: Drafter, input_ids: Tensor, temperature: float) -> None:
    """First calls pay for kernels and memory; not part of the measurement."""
    decode(model, drafter, input_ids, max_new_tokens=WARM_UP_TOKENS, temperature=temperature)
    plain(model, input_ids, max_new_tokens=WARM_UP_TOKENS, temperature=temperature)


def _answer(
    model: nn.Module,
    drafter: Drafter,
    prompt: Conversation,
    input_ids: Tensor,
    config: EvaluateConfig,
    stops: frozenset[int],
    seed: int,
) -> _Answer:
    tokens, temperature = config.max_new_tokens, config.temperature
    fast = decode(model, drafter, input_ids, max_new_tokens=tokens, stop_ids=stops, temperature=temperature, seed=seed)
    slow = plain(model, input_ids, max_new_tokens=tokens, stop_ids=stops, temperature=temperature, seed=seed)
    differs = temperature == 0 and fast.tokens != slow.tokens
    return _Answer(prompt, fast, slow, _mismatch(model, prompt.row, input_ids, fast, slow) if differs else None)


@torch.no_grad()
def _mismatch(model: nn.Module, row: int, input_ids: Tensor, fast: Decoded, slow: Plain) -> Mismatch:
    length = min(len(fast.tokens), len(slow.tokens))
    position = next((i for i in range(length) if fast.tokens[i] != slow.tokens[i]), length)
    ids = torch.cat((input_ids, input_ids.new_tensor(slow.tokens[:position])))
    raw = model(input_ids=ids[None], use_cache=False, logits_to_keep=1).logits[0, -1]
    logits = raw.float()
    best = logits.topk(2).values
    token = fast.tokens[position] if position < len(fast.tokens) else None
    gap = None if token is None else float(best[0] - logits[token])
    expected = slow.tokens[position] if position < len(slow.tokens) else None
    tie = gap is not None and gap <= rounding(raw.dtype) * float(logits.abs().max())
    return Mismatch(row, position, token, expected, float(best[0] - best[1]), gap, tie)


def _result(answers: list[_Answer], dtype: str, block_size: int, config: EvaluateConfig) -> Result:
    names = list(dict.fromkeys(answer.prompt.slice_name for answer in answers))
    greedy = config.temperature == 0
    slices = [_slice(OVERALL, answers, block_size, greedy)]
    slices += [_slice(name, [a for a in answers if a.prompt.slice_name == name], block_size, greedy) for name in names]
    return Result(dtype, config.temperature, config.max_new_tokens, block_size, tuple(slices))


def _slice(name: str, answers: Sequence[_Answer], block_size: int, greedy: bool) -> Slice:
    fast, slow = [a.speculative for a in answers], [a.plain for a in answers]
    tokens = sum(len(answer.tokens) for answer in fast)
    mismatches = tuple(a.mismatch for a in answers if a.mismatch is not None)
    return Slice(
        name=name,
        prompts=len(answers),
        tokens=tokens,
        acceptance=acceptance([block for answer in fast for block in answer.blocks], block_size - 1),
        tokens_per_second=tokens / sum(answer.seconds.total for answer in fast),
        plain_tokens_per_second=sum(len(answer.tokens) for answer in slow) / sum(answer.seconds for answer in slow),
        identical=len(answers) - len(mismatches) if greedy else None,
        mismatches=mismatches,
    )
