"""The target's tokenizer and chat template, used exactly as a server uses them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftmill.data.read import RowError
from draftmill.errors import UserError

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation. `tags`: (start, end) characters inside `{% generation %}` tags; None: no such tags."""

    text: str
    tags: tuple[tuple[int, int], ...] | None


def load_tokenizer(model: str) -> Any:
    """The target's fast tokenizer. Raises UserError when there is none."""
    from transformers import AutoTokenizer

    folder, options = model, {}
    if model.endswith(".gguf"):
        folder, options = str(Path(model).parent), {"gguf_file": Path(model).name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, ImportError) as error:
        why = str(error).strip().splitlines()[0]
        raise UserError(
            f"No tokenizer could be loaded from {model} ({why}); nothing was prepared. "
            "Give the target's folder, .gguf file or hub id as `model`."
        ) from None
    if not tokenizer.is_fast:
        raise UserError(
            f"The tokenizer of {model} is a slow one without character offsets, so answers cannot be located; "
            "nothing was prepared. Save it as tokenizer.json (the `tokenizers` format) beside the model."
        )
    return tokenizer


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of vocabulary and chat template: two tokenizers with the same one give the same tokens for a chat."""
    content = [sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


class ChatTokenizer:
    """Renders conversations and encodes text.

    vocab_size    highest token id + 1, added tokens included; the model's embedding may have more rows
    is_special    [vocab_size] bool, True for special tokens: end of turn, role marks …
    """

    def __init__(self, model: str, template_kwargs: dict[str, Any]) -> None:
        self.model = model
        self.tokenizer = load_tokenizer(model)
        self.fingerprint = tokenizer_fingerprint(self.tokenizer)
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        self.is_special = _special_tokens(self.tokenizer, self.vocab_size)
        self._template_values = {**self.tokenizer.special_tokens_map, **template_kwargs}
        self._backend = self.tokenizer.backend_tokenizer
        self._backend.no_truncation()  # a tokenizer.json may have either switched on
        self._backend.no_padding()
        # The text before an answer is nearly always the same few characters ("<|im_start|>assistant\n").
        self.encode_again = lru_cache(maxsize=256)(self._encode_one)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Rendered:
        """The conversation as text. Raises RowError when the template refuses it or it is not valid Unicode."""
        template = self._template(tools)
        tagged = GENERATION_TAG.search(template) is not None
        text, spans = self._run_template(template, messages, tools, return_assistant_tokens_mask=tagged)
        return Rendered(text, tuple((start, end) for start, end in spans[0]) if tagged else None)

    def render_prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """What a server gives the model when it is to answer `messages`."""
        return self._run_template(self._template(tools), messages, tools, add_generation_prompt=True)[0]

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """`tokenizers.Encoding` of each text; nothing is added to it."""
        encodings: list[Any] = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return encodings

    def _encode_one(self, text: str) -> npt.NDArray[np.int32]:
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def _template(self, tools: list[dict[str, Any]] | None) -> str:
        if not self.tokenizer.chat_template:
            raise UserError(
                f"The tokenizer of {self.model} has no chat template, so conversations have no form the model knows; "
                "nothing was prepared. Use the chat (instruct) model, or rows with input_ids and loss_mask."
            )
        template: str = self.tokenizer.get_chat_template(tools=tools)
        return template

    def _run_template(
        self, template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **options: bool
    ) -> tuple[str, list[list[tuple[int, int]]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[messages], tools=tools, chat_template=template, **options, **self._template_values
            )
            texts[0].encode()  # a lone surrogate (half of "\ud83d\ude00") would stop the tokenizer
        except UnicodeEncodeError as error:
            raise RowError("not_unicode", str(error)) from None
        except Exception as error:  # a template may raise anything, and does so on purpose for roles it does not know
            raise RowError("template_refuses", f"{type(error).__name__}: {error}") from None
        return texts[0], spans


def _special_tokens(tokenizer: Any, vocab_size: int) -> npt.NDArray[np.bool_]:
    special = np.zeros(vocab_size, dtype=np.bool_)
    added = [token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special]
    special[np.array([*added, *tokenizer.all_special_ids], dtype=np.int64)] = True
    return special
