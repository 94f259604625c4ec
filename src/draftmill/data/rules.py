"""Which rows are conversations a chat template can take, and what each other row lacks.

Every function raises RowError with its own reason; docs/data.md lists them all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from draftmill.data.read import RowError, stem_of
from draftmill.records import Conversation

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckedConversation:
    """A conversation that ends with an assistant turn.

    `trailing_removed`: turns after the last assistant turn that were taken off.
    `finished`: False when the row says its last answer was cut at a length limit, so the end of turn is not its own.
    """

    conversation: Conversation
    trailing_removed: int
    finished: bool


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row that came tokenised: input_ids [n] int32, loss_mask [n] bool."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]


def slice_name(content: dict[str, Any], source: str) -> str:
    """The row's `source` field, or the file's name without ending: results are reported by slice."""
    given = content.get("source")
    return given if isinstance(given, str) and given else stem_of(source)


def check_conversation(content: dict[str, Any], source: str, row: int) -> CheckedConversation:
    """The row's conversation with roles, contents and tool calls in one form."""
    messages = [_message(item, place) for place, item in enumerate(_message_list(content), start=1)]
    _check_order([message["role"] for message in messages])
    last_answer = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
    conversation = Conversation(
        messages=messages[: last_answer + 1],
        tools=_tools(content.get("tools")),
        source=source,
        row=row,
        slice_name=slice_name(content, source),
    )
    removed = len(messages) - last_answer - 1
    # Where turns follow, the last answer of the row was not the one that was cut.
    finished = content.get("finished") is not False or removed > 0
    return CheckedConversation(conversation, removed, finished)


def check_question(content: dict[str, Any], source: str, row: int) -> Conversation:
    """The row's conversation, which may end with a question that nobody has answered yet.

    By the rules of `check_conversation`; `prompt`, a string, stands for a single user turn.
    """
    if isinstance(content.get("prompt"), str) and not {"messages", "conversations"} & content.keys():
        content = {**content, "messages": [{"role": "user", "content": content["prompt"]}]}
    turns = _message_list(content)
    last = turns[-1]
    if not isinstance(last, dict) or ROLES.get(str(last.get("role", last.get("from"))).lower()) == "assistant":
        return check_conversation(content, source, row).conversation
    answered = {**content, "messages": [*turns, {"role": "assistant", "content": "?"}]}
    conversation = check_conversation(answered, source, row).conversation
    return replace(conversation, messages=conversation.messages[:-1])


def check_tokens(content: dict[str, Any], vocab_size: int) -> TokenRow:
    """The row's own `input_ids` and `loss_mask`."""
    ids, mask = content.get("input_ids"), content.get("loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list):
        raise RowError("tokens_not_lists", "`input_ids` and `loss_mask` must both be lists")
    if len(ids) != len(mask):
        raise RowError("token_lengths_differ", f"{len(ids)} input_ids but {len(mask)} values in loss_mask")
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RowError("token_outside_vocabulary", f"input_ids[{place}] is {token!r}, not in 0…{vocab_size - 1}")
    for place, flag in enumerate(mask):
        if not isinstance(flag, int) or flag not in (0, 1):
            raise RowError("loss_mask_not_binary", f"loss_mask[{place}] is {flag!r}, not 0 or 1")
    return TokenRow(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_))


def _message_list(content: dict[str, Any]) -> list[Any]:
    name = next((key for key in ("messages", "conversations") if content.get(key) is not None), None)
    if name is None:
        raise RowError("no_messages", f"neither `messages` nor `conversations` among {sorted(content)}")
    value = content[name]
    if not isinstance(value, list):
        raise RowError("messages_not_a_list", f"`{name}` is a {type(value).__name__}")
    if not value:
        raise RowError("empty_conversation", f"`{name}` is empty")
    return value


def _message(item: Any, place: int) -> Message:
    if not isinstance(item, dict):
        raise RowError("message_not_an_object", f"message {place} is a {type(item).__name__}")
    role = _role(item, place)
    message: Message = {"role": role}
    calls = _tool_calls(item.get("tool_calls"), place)
    if calls and role != "assistant":
        raise RowError("tool_calls_outside_assistant", f"message {place} ({role}) has tool calls")
    message["content"] = _content(item.get("content", item.get("value")), place, optional=bool(calls))
    if calls:
        message["tool_calls"] = calls
    message |= {key: item[key] for key in ("name", "tool_call_id") if isinstance(item.get(key), str)}
    return message | _reasoning(item, place)


def _role(item: Message, place: int) -> str:
    given = item.get("role", item.get("from"))
    if not isinstance(given, str):
        raise RowError("no_role", f"message {place} has no `role` or `from`")
    role = ROLES.get(given.lower())
    if role is None:
        raise RowError("unknown_role", f"message {place} has role {given!r}")
    return role


def _content(value: Any, place: int, optional: bool) -> str:
    """The text. Null is allowed beside tool calls and becomes "", which every template can join to a string."""
    if isinstance(value, str):
        return value
    if value is None:
        if optional:
            return ""
        raise RowError("null_content", f"message {place} has no content and no tool calls")
    if not isinstance(value, list):
        raise RowError("content_not_text", f"the content of message {place} is a {type(value).__name__}")
    return "".join(_part(part, place) for part in value)


def _part(part: Any, place: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RowError("content_not_text", f"message {place} has a part of type {kind!r}; only text is trained")


def _reasoning(item: Message, place: int) -> Message:
    value = next((item[key] for key in REASONING_FIELDS if item.get(key) is not None), None)
    if value is None:
        return {}
    if not isinstance(value, str):
        raise RowError("reasoning_not_text", f"the reasoning of message {place} is a {type(value).__name__}")
    return {"reasoning_content": value}


def _from_json(value: Any, reason: str, what: str) -> Any:
    """A value that may come as a JSON string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise RowError(reason, f"{what} is no JSON: {error}") from None


def _tool_calls(value: Any, place: int) -> list[dict[str, Any]]:
    calls = _from_json(value, "tool_calls_not_a_list", f"`tool_calls` of message {place}")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise RowError("tool_calls_not_a_list", f"`tool_calls` of message {place} is a {type(calls).__name__}")
    return [_tool_call(call, place) for call in calls]


def _tool_call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function") or call if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError("tool_call_without_name", f"a tool call of message {place} names no function")
    function = {**function, "arguments": _arguments(function.get("arguments"), place)}
    nested = isinstance(call.get("function"), dict)
    return {**call, "function": function} if nested else function


def _arguments(value: Any, place: int) -> dict[str, Any]:
    arguments = _from_json(value, "tool_arguments_not_json", f"the arguments of a tool call of message {place}")
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        raise RowError("tool_arguments_not_an_object", f"the arguments of a tool call of message {place} are a {kind}")
    return arguments


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = _from_json(value, "tools_not_a_list", "`tools`")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("tools_not_a_list", "`tools` is not a list of objects")
    return tools


def _check_order(roles: list[str]) -> None:
    _check_system(roles)
    if "user" not in roles:
        raise RowError("no_user", "no message is the user's")
    first = next(role for role in roles if role != "system")
    if first == "assistant":
        raise RowError("assistant_first", "the first turn is the assistant's")
    for place, (before, role) in enumerate(pairwise(roles), start=2):
        if before == role == "user":
            raise RowError("two_users_in_a_row", f"messages {place - 1} and {place} are both the user's")
        if before == role == "assistant":
            raise RowError("two_assistants_in_a_row", f"messages {place - 1} and {place} are both the assistant's")
    for place, (before, role) in enumerate(pairwise(["", *roles]), start=1):
        if role == "tool" and before not in ("assistant", "tool"):
            raise RowError("tool_without_call", f"message {place} is a tool's but follows no assistant turn")
    if "assistant" not in roles:
        raise RowError("no_assistant", "no message is the assistant's, so there is nothing to train")


def _check_system(roles: list[str]) -> None:
    if roles.count("system") > 1:
        raise RowError("system_twice", f"{roles.count('system')} system messages")
    if roles == ["system"]:
        raise RowError("system_only", "the only message is the system's")
    if "system" in roles[1:]:
        raise RowError("system_not_first", f"message {roles.index('system') + 1} is the system's")
