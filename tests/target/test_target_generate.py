"""Batched answers are what the target would say to each prompt alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from target_models import VOCAB, build, documents
from torch import nn
from transformers import GenerationConfig

from draftmill.target.generate import Answer, answer_batch

LIMIT = 12
NEVER = VOCAB - 1  # its head row is made such that it is never the best


@pytest.fixture
def model() -> nn.Module:
    made = build("llama")
    made.lm_head.weight[NEVER] = 0.0
    return made


PROMPTS = [text.tolist() for text in documents([3, 11, 1, 7], vocab=NEVER)]


def alone(model: nn.Module, prompt: list[int], count: int = LIMIT) -> list[int]:
    """Greedy, one token at a time, without cache or batch."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def answers(model: nn.Module, **changes: object) -> list[Answer]:
    options = {"max_new_tokens": LIMIT, "temperature": 0.0, "stop_ids": [NEVER], "seed": 0}
    return answer_batch(model, PROMPTS, **(options | changes))


def test_greedy_answers_of_a_batch_are_those_of_each_prompt_alone(model: nn.Module) -> None:
    wanted = [alone(model, prompt) for prompt in PROMPTS]
    assert len({tuple(answer) for answer in wanted}) == len(PROMPTS)
    assert answers(model) == [Answer(answer, finished=False) for answer in wanted]


def test_answers_are_cut_at_the_first_stop_id_and_only_those_are_finished(model: nn.Module) -> None:
    whole = [alone(model, prompt) for prompt in PROMPTS]
    stops = {whole[0][4], whole[1][2]}
    wanted = []
    for answer in whole:
        place = next((i for i, token in enumerate(answer) if token in stops), None)
        wanted.append(Answer(answer[:place], finished=place is not None))
    assert {answer.finished for answer in wanted} == {True, False}
    assert answers(model, stop_ids=stops) == wanted


def test_a_stop_token_as_the_last_one_allowed_is_finished(model: nn.Module) -> None:
    first = alone(model, PROMPTS[0])
    stop = next(token for i, token in enumerate(first) if i > 1 and token not in first[:i])
    length = first.index(stop) + 1
    assert answers(model, stop_ids=[stop], max_new_tokens=length)[0] == Answer(first[: length - 1], finished=True)
    assert answers(model, stop_ids=[stop], max_new_tokens=length - 1)[0] == Answer(first[: length - 1], finished=False)


def test_generation_defaults_of_the_checkpoint_are_not_applied(model: nn.Module) -> None:
    plain = answers(model)
    sampled = answers(model, temperature=1.0)
    own = GenerationConfig(
        repetition_penalty=50.0, no_repeat_ngram_size=1, top_k=1, top_p=0.1, min_new_tokens=9, pad_token_id=0
    )
    model.generation_config = own
    assert answers(model) == plain
    assert answers(model, temperature=1.0) == sampled
    assert model.generation_config is own, "the checkpoint's defaults must be put back"
    ids = torch.tensor([PROMPTS[0]])
    with_defaults = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, do_sample=False)
    assert with_defaults[0, 3:].tolist() != plain[0].token_ids, "these defaults would have shown"


def test_the_same_seed_gives_the_same_sample(model: nn.Module) -> None:
    first = answers(model, temperature=1.0, seed=3)
    torch.manual_seed(99)
    assert answers(model, temperature=1.0, seed=3) == first
    assert answers(model, temperature=1.0, seed=4) != first
    assert first != answers(model)


def test_sampling_draws_from_the_models_own_distribution(model: nn.Module) -> None:
    """No top-k, no top-p: first tokens of many samples have the frequencies of the softmax."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0]]), use_cache=False).logits[0, -1]
    draws = 4000
    found = answer_batch(
        model, [PROMPTS[0]] * draws, max_new_tokens=1, temperature=4.0, stop_ids=[NEVER], seed=0
    )  # fmt: skip
    counts = torch.zeros(VOCAB, dtype=torch.float64)
    for answer in found:
        counts[answer.token_ids[0] if answer.token_ids else NEVER] += 1
    wanted = torch.softmax(logits.double() / 4.0, -1)
    chi_square = float(((counts - draws * wanted) ** 2 / (draws * wanted)).sum())
    assert chi_square < (VOCAB - 1) + 5 * (2 * (VOCAB - 1)) ** 0.5


@pytest.mark.slow
def test_the_real_target_answers_and_stops(smollm2: Path) -> None:
    from draftmill.data.tokenizer import ChatTokenizer
    from draftmill.target.config import TargetConfig
    from draftmill.target.model import load_causal_lm

    chat = ChatTokenizer(str(smollm2), {})
    texts = ["What is the capital of France?", "Say only the word yes."]
    prompts = [chat.encode([chat.render_prompt([{"role": "user", "content": t}], None)])[0].ids for t in texts]
    target = load_causal_lm(TargetConfig(model=str(smollm2), dtype="float32"), device="cpu")
    found = answer_batch(target, prompts, max_new_tokens=24, temperature=0, stop_ids=[2], seed=0)
    assert found[0] == Answer(found[0].token_ids, finished=True)
    assert "Paris" in chat.tokenizer.decode(found[0].token_ids)
    assert all(2 not in answer.token_ids for answer in found)
