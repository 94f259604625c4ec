"""Prompts from a file of conversations, rendered as the target is served."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from draftmill.data.read import Row, RowError, RowReader, parse
from draftmill.data.rules import check_question
from draftmill.errors import UserError
from draftmill.records import Conversation


def read_prompts(path: Path, limit: int | None = None) -> list[Conversation]:
    """The first `limit` prompts of a file that `prepare` reads too, each up to its last question.

    A row that is no prompt is an error here: an evaluation that leaves rows out answers another question. Raises
    UserError naming file, line and reason.
    """
    prompts = [_prompt(row, path) for row in islice(RowReader([path]), limit)]
    if not prompts:
        raise UserError(f"{path} holds no rows; nothing was evaluated. Give a file with one prompt per line")
    return prompts


def _prompt(row: Row, path: Path) -> Conversation:
    try:
        conversation = check_question(parse(row), row.source, row.row)
    except RowError as error:
        raise _bad(path, row.row, f"{error.reason}: {error.detail}") from None
    return replace(conversation, messages=until_answer(conversation.messages))


def until_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Everything up to, not including, the last assistant turn; all of it where the last turn is not answered."""
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def render(prompt: Conversation, tokenizer: Any, template_kwargs: dict[str, Any], path: Path) -> list[int]:
    """Token ids of the prompt up to where the answer begins."""
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise UserError(
            "the tokenizer has no chat template, so prompts cannot be rendered as the target is served; nothing was "
            "evaluated. Give a target with a chat template"
        )
    try:
        ids = tokenizer.apply_chat_template(
            prompt.messages, tools=prompt.tools, add_generation_prompt=True, return_dict=False, **template_kwargs
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise _bad(path, prompt.row, f"is refused by the chat template ({error})") from None
    return [int(token) for token in ids]


def _bad(path: Path, number: int, what: str) -> UserError:
    return UserError(f"{path}, line {number} {what}; nothing was evaluated. Mend or remove the line")
