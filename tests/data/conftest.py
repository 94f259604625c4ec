"""Tiny tokenizers with chat templates of their own, saved as the folder of a target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MakeTarget = Callable[..., Path]


def byte_tokenizer(merges: list[tuple[str, str]] | None = None, special: bool = True) -> Any:
    """One token a byte, plus `merges`, plus the ChatML marks as special tokens."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + ["".join(pair) for pair in merges or []]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges or []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if special:
        marks = ["<|im_start|>", "<|im_end|>", "<|idle|>"]
        tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>" if special else None)


@pytest.fixture
def make_target(tmp_path: Path) -> MakeTarget:
    """(template, merges, special) → folder with such a tokenizer."""

    def make(template: str | None = CHATML, **options: Any) -> Path:
        folder = tmp_path / f"target-{len(list(tmp_path.iterdir()))}"
        tokenizer = byte_tokenizer(**options)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """(rows, name) → JSON Lines file; a row that is a string is written as it is."""

    def write(rows: list[Any], name: str = "chat.jsonl") -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write
