from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftmill.data.read import RowError
from draftmill.data.rules import CheckedConversation, check_conversation, check_tokens

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind"}


def check(messages: Any, **fields: Any) -> CheckedConversation:
    return check_conversation({"messages": messages, **fields}, "chat.jsonl", 3)


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "empty_conversation"),
        ("Hi", "messages_not_a_list"),
        (None, "no_messages"),
        ([SYSTEM], "system_only"),
        ([SYSTEM, ANSWER], "no_user"),
        ([ANSWER, USER, ANSWER], "assistant_first"),
        ([SYSTEM, ANSWER, USER, ANSWER], "assistant_first"),
        ([USER, USER, ANSWER], "two_users_in_a_row"),
        ([USER, ANSWER, ANSWER], "two_assistants_in_a_row"),
        ([SYSTEM, SYSTEM, USER, ANSWER], "system_twice"),
        ([USER, SYSTEM, ANSWER], "system_not_first"),
        ([USER], "no_assistant"),
        ([USER, None], "message_not_an_object"),
        ([USER, "Hello"], "message_not_an_object"),
        ([USER, {"content": "Hello"}], "no_role"),
        ([USER, {"role": "oracle", "content": "Hello"}], "unknown_role"),
        ([USER, {"role": "assistant", "content": None}], "null_content"),
        ([USER, {"role": "assistant"}], "null_content"),
        ([USER, {"role": "assistant", "content": 3}], "content_not_text"),
        ([{"role": "user", "content": [{"type": "image"}]}, ANSWER], "content_not_text"),
        ([{**USER, "tool_calls": [call({})]}, ANSWER], "tool_calls_outside_assistant"),
        ([USER, {**ANSWER, "tool_calls": [call("{oh")]}], "tool_arguments_not_json"),
        ([USER, {**ANSWER, "tool_calls": [call("[1]")]}], "tool_arguments_not_an_object"),
        ([USER, {**ANSWER, "tool_calls": [{}]}], "tool_call_without_name"),
        ([USER, {**ANSWER, "tool_calls": {"name": "x"}}], "tool_calls_not_a_list"),
        ([USER, {"role": "tool", "content": "3"}, ANSWER], "tool_without_call"),
        ([USER, {**ANSWER, "reasoning_content": 1}], "reasoning_not_text"),
    ],
)
def test_case_01_bad_conversation_has_its_own_reason(messages: Any, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        check(messages)
    assert caught.value.reason == reason
    assert caught.value.detail


def test_case_01_bad_tools() -> None:
    for tools in ["{oh", '{"a": 1}', [1], 3]:
        with pytest.raises(RowError, match="tools_not_a_list"):
            check([USER, ANSWER], tools=tools)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [({"city": "Ulm"}, {"city": "Ulm"}), ('{"city": "Ulm"}', {"city": "Ulm"}), (None, {}), ("", {}), ("null", {})],
)
def test_case_01_tool_call_arguments_become_an_object(arguments: Any, expected: dict[str, Any]) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
    tool = {"role": "tool", "content": "rain", "tool_call_id": "1"}
    messages = check([USER, turn, tool, ANSWER], tools='[{"type": "function"}]').conversation.messages
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [call(expected)]}
    assert messages[2] == tool
    assert check([USER, {**turn, "tool_calls": [{"name": "f", "arguments": arguments}]}]).conversation.messages[1][
        "tool_calls"
    ] == [{"name": "f", "arguments": expected}]


def test_both_spellings_give_one_form() -> None:
    row = {
        "conversations": [
            {"from": "system", "value": "Be kind"},
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello"},
        ]
    }
    conversation = check_conversation(row, "a/chat.jsonl.gz", 7).conversation
    assert conversation.messages == [SYSTEM, USER, ANSWER]
    assert (conversation.source, conversation.row, conversation.slice_name) == ("a/chat.jsonl.gz", 7, "chat")
    assert conversation.tools is None


def test_text_parts_reasoning_and_source() -> None:
    turn = {"role": "assistant", "content": [{"type": "text", "text": "Hel"}, "lo"], "thinking": "hm", "weight": 0}
    checked = check([USER, turn], source="maths", tools=[])
    assert checked.conversation.messages[1] == {**ANSWER, "reasoning_content": "hm"}
    assert checked.conversation.slice_name == "maths"
    assert checked.finished
    assert not check([USER, turn], finished=False).finished


def test_turns_after_the_last_answer_are_removed_and_counted() -> None:
    checked = check([USER, ANSWER, USER], finished=False)
    assert checked.conversation.messages == [USER, ANSWER]
    assert checked.trailing_removed == 1
    assert checked.finished  # it is not the last answer of the row that was cut


def test_token_rows() -> None:
    row = check_tokens({"input_ids": [1, 2, 9], "loss_mask": [0, 1, True]}, 10)
    np.testing.assert_array_equal(row.input_ids, np.array([1, 2, 9], dtype=np.int32))
    assert row.loss_mask.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("ids", "mask", "reason"),
    [
        ([1, 2], [1], "token_lengths_differ"),
        ([1, 10], [1, 1], "token_outside_vocabulary"),
        ([1, -1], [1, 1], "token_outside_vocabulary"),
        ([1, 2.0], [1, 1], "token_outside_vocabulary"),
        ([1, True], [1, 1], "token_outside_vocabulary"),
        ([1, 2], [1, 2], "loss_mask_not_binary"),
        ([1, 2], [1, None], "loss_mask_not_binary"),
        ([1, 2], None, "tokens_not_lists"),
        ("12", "11", "tokens_not_lists"),
    ],
)
def test_case_09_bad_token_row_has_its_own_reason(ids: Any, mask: Any, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        check_tokens({"input_ids": ids, "loss_mask": mask}, 10)
    assert caught.value.reason == reason
