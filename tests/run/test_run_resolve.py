"""What follows from the user's wishes, the target and the data, before weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftmill.drafter.config import DrafterConfig
from draftmill.errors import UserError
from draftmill.run.resolve import resolve_mask_token, resolve_spec
from draftmill.target.shape import load_config, read_shape


class Counts:
    def __init__(self, **occurring: int) -> None:
        self.occurring = {int(key[1:]): value for key, value in occurring.items()}

    def occurs(self, token_id: int) -> int:
        return self.occurring.get(token_id, 0)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


def test_sizes_default_from_the_target(smollm2: Path) -> None:
    spec = resolve_spec(DrafterConfig(), read_shape(load_config(str(smollm2))), 7)
    assert (spec.hidden_size, spec.intermediate_size, spec.head_dim) == (576, 1536, 64)
    assert (spec.num_attention_heads, spec.num_key_value_heads) == (9, 3)
    assert spec.rope_theta == 100000.0
    assert spec.taps == (1, 8, 14, 20, 27)
    assert spec.layer_causal == (False,) * 5
    assert spec.num_target_layers == 30


def test_sliding_layers_are_causal_unless_said_otherwise(smollm2: Path) -> None:
    shape = read_shape(load_config(str(smollm2)))
    kinds = ["sliding_attention", "full_attention"]
    mixed = DrafterConfig(layers=2, layer_types=kinds, sliding_window=64)
    assert resolve_spec(mixed, shape, 7).layer_causal == (True, False)
    assert resolve_spec(mixed.model_copy(update={"is_causal": False}), shape, 7).layer_causal == (False, False)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"taps": [1, 30]}, r"the target's layers are 0 … 29"),
        ({"num_attention_heads": 4}, "4 query heads cannot share 3 key/value heads"),
        ({"head_dim": 7}, "odd"),
    ],
)
def test_impossible_sizes_are_refused(smollm2: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve_spec(DrafterConfig(**values), read_shape(load_config(str(smollm2))), 7)


def test_case_09_an_unused_row_serves_as_mask(tokenizer: Any) -> None:
    token, origin = resolve_mask_token(None, tokenizer, 49160, Counts())
    assert token == 49152
    assert "unused embedding row" in origin


def test_case_09_without_an_unused_row_the_user_must_choose_and_is_told_among_what(tokenizer: Any) -> None:
    with pytest.raises(UserError) as caught:
        resolve_mask_token(None, tokenizer, 49152, Counts(_3=2))
    assert "no unused row" in str(caught.value)
    assert "4 <reponame>" in str(caught.value)
    assert "3 <repo_name>" not in str(caught.value)  # it occurs


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (2, "is the tokenizer's eos token"),  # also the pad token
        (1, "is the tokenizer's bos token"),
        (7, "occurs 3 times in the prepared data"),
        (60000, "outside the target's embedding of 49152 rows"),
    ],
)
def test_case_09_a_mask_that_is_a_real_token_is_refused(tokenizer: Any, wanted: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve_mask_token(wanted, tokenizer, 49152, Counts(_7=3))
    assert resolve_mask_token(16, tokenizer, 49152, Counts())[0] == 16
