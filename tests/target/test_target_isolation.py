"""Documents of one batch never see each other, whatever the architecture."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from target_models import WINDOW, batch_of, captured, documents, gap, load, plain_features, plain_model
from torch import nn

from draftmill.errors import UserError
from draftmill.target.capture import Target
from draftmill.target.isolation import row_groups

ROUNDING = {"float32": 2e-5, "bfloat16": 0.05}


def odd_lengths(seed: int) -> list[int]:
    """Lengths from 1 to 4 windows, the first and the last document a single token."""
    draw = random.Random(seed)
    return [1, *(draw.choice(range(1, 4 * WINDOW, 2)) for _ in range(draw.randint(2, 6))), 3 * WINDOW + 1, 1]


def batch_and_reference(
    folder: Path, seed: int, dtype: str, taps: tuple[int, ...]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    texts = documents(odd_lengths(seed), seed=seed)
    return texts, plain_features(plain_model(folder, dtype), texts, taps)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in ("llama", "mistral", "gemma3", "qwen3", "moe")),
        *((name, "bfloat16") for name in ("llama", "mistral", "gemma3", "qwen3")),  # moe: rounding picks other experts
    ],
)
def test_case_13_packed_equals_separate(folders: dict[str, Path], name: str, seed: int, dtype: str) -> None:
    target = load(folders[name], (1, 3), dtype=dtype)
    assert target.isolation == "packed"
    texts, separate = batch_and_reference(folders[name], seed, dtype, (1, 3))
    batch = batch_of(texts, len(separate) + 5)
    assert gap(captured(target, batch)[: len(separate)], separate) < ROUNDING[dtype]
    one_document = plain_features(plain_model(folders[name], dtype), [torch.cat(texts)], (1, 3))
    assert gap(one_document, separate) > 0.3, "these documents would not show a leak"


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "moe", "hybrid"])
def test_case_13_rows_equal_separate(folders: dict[str, Path], name: str) -> None:
    target = load(folders[name], (1, 3), isolation="rows")
    assert target.isolation == "rows"
    texts, separate = batch_and_reference(folders[name], 1, "float32", (1, 3))
    assert gap(captured(target, batch_of(texts)), separate) < ROUNDING["float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_case_13_recurrent_state_takes_rows_and_never_packed(folders: dict[str, Path], dtype: str) -> None:
    target = load(folders["hybrid"], (1, 3), dtype=dtype)
    assert target.isolation == "rows"
    texts, separate = batch_and_reference(folders["hybrid"], 2, dtype, (1, 3))
    assert gap(captured(target, batch_of(texts)), separate) < ROUNDING[dtype]
    with pytest.raises(UserError, match=r"target\.isolation: packed, .* Use auto or rows"):
        load(folders["hybrid"], (1, 3), dtype=dtype, isolation="packed")


def test_case_13_the_window_of_a_sliding_target_is_kept(folders: dict[str, Path]) -> None:
    """A first layer's state depends on its window's tokens and on no others."""
    target = load(folders["mistral"], (0,))
    (text,) = documents([3 * WINDOW])
    changed = text.clone()
    changed[0] += 1
    before, after = (captured(target, batch_of([t])) for t in (text, changed))
    assert (before != after).any(-1).tolist() == [True] * WINDOW + [False] * 2 * WINDOW


@pytest.mark.slow
def test_case_13_packed_equals_separate_in_the_real_target(real: Target, real_plain: nn.Module) -> None:
    assert real.isolation == "packed"
    texts = documents([1, 37, 5, 64, 1], vocab=49152, seed=3)
    separate = plain_features(real_plain, texts, real.taps)
    assert gap(captured(real, batch_of(texts, 120))[:108], separate) < 0.05
    assert gap(plain_features(real_plain, [torch.cat(texts)], real.taps), separate) > 0.5


@pytest.mark.slow
def test_case_13_packed_equals_separate_in_the_real_target_in_float32(smollm2: Path) -> None:
    texts = documents([1, 21, 5, 33, 1], vocab=49152, seed=4)
    target = load(smollm2, (1, 14, 28))
    separate = plain_features(plain_model(smollm2), texts, (1, 14, 28))
    assert gap(captured(target, batch_of(texts)), separate) < 1e-4


@pytest.mark.parametrize("isolation", ["auto", "rows"])
@pytest.mark.parametrize("name", ["softcap", "sinks"])
def test_case_13_packed_attention_never_leaves_out_a_part_of_the_targets_own(
    folders: dict[str, Path], name: str, isolation: str
) -> None:
    """Learnt sinks (GPT-OSS) and soft-capped scores (Gemma 2): the states are those of the model's own attention."""
    target = load(folders[name], (1, 3), isolation=isolation)
    texts, separate = batch_and_reference(folders[name], 0, "float32", (1, 3))
    assert gap(captured(target, batch_of(texts)), separate) < ROUNDING["float32"]
    with target.whole() as model, torch.no_grad():
        inside = model(texts[1][None].long(), use_cache=False).logits
        wanted = plain_model(folders[name])(texts[1][None].long(), use_cache=False).logits
    assert torch.equal(inside, wanted)


@pytest.mark.parametrize("name", ["softcap", "sinks"])
def test_case_13_packed_is_refused_where_it_would_be_another_attention(folders: dict[str, Path], name: str) -> None:
    if plain_model(folders[name]).config._attn_implementation == "sdpa":
        pytest.skip("this transformers runs the model by plain SDPA itself")
    with pytest.raises(UserError, match=r"target\.isolation: packed, .* Use auto or rows"):
        load(folders[name], (1, 3), isolation="packed")


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), budget=st.integers(1, 100))
def test_row_groups_hold_each_document_once_and_keep_to_the_budget(lengths: list[int], budget: int) -> None:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    groups = row_groups([(end - length, end) for end, length in zip(ends, lengths, strict=True)], budget)
    assert sorted(document for group in groups for document in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[document] for document in group) <= budget
