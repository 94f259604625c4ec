"""Prompts from a JSON Lines file, rendered as the target is served."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftmill.errors import UserError

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """messages end with the turn to be answered. row: 1-based line. source: name of its slice."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    source: str
    row: int


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a JSON Lines file, in order. Raises UserError naming file and line."""
    if not path.is_file():
        raise UserError(f"{path} is not a file; nothing was evaluated. Correct evaluate.prompts")
    lines = path.read_text(encoding="utf-8").splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][:limit]
    if not numbered:
        raise UserError(f"{path} holds no rows; nothing was evaluated. Give a file with one prompt per line")
    return [_prompt(line, path, number) for number, line in numbered]


def _prompt(line: str, path: Path, number: int) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise _bad(path, number, f"is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise _bad(path, number, "is not a JSON object")
    if isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    else:
        turns = row.get("messages", row.get("conversations"))
        messages = until_answer(_messages(turns, path, number))
    if not messages:
        raise _bad(path, number, "has nothing before the answer")
    source = row.get("source")
    return Prompt(messages, row.get("tools"), source if isinstance(source, str) else path.stem, number)


def until_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Everything up to, not including, the last assistant turn; all of it where the last turn is not answered."""
    if messages[-1]["role"] != "assistant":
        return messages
    return messages[:-1]


def _messages(turns: Any, path: Path, number: int) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not turns:
        raise _bad(path, number, "has neither `messages` nor `conversations` nor a `prompt` string")
    messages = []
    for turn in turns:
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        if not isinstance(role, str):
            raise _bad(path, number, "has a turn without a role")
        rest = {key: value for key, value in turn.items() if key not in ("role", "from", "value")}
        content = {"content": turn["value"]} if "value" in turn else {}
        messages.append({"role": ROLES.get(role, role), **content, **rest})
    return messages


def render(prompt: Prompt, tokenizer: Any, template_kwargs: dict[str, Any], path: Path) -> list[int]:
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
