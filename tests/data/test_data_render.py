"""Masks: what exactly is trained, for well- and ill-behaved templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftmill.data.chunk import Chunk, make_chunk
from draftmill.data.config import PrepareConfig
from draftmill.data.read import Row
from draftmill.data.tokenizer import ChatTokenizer
from draftmill.errors import UserError

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
TWO_TURNS = [USER, ANSWER, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]

# Tags around the content only: the end of turn lies outside.
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGS_COVER_NOTHING = TAGGED.replace("m['role'] == 'assistant'", "false")
TAGS_COVER_ALL = (
    "{% generation %}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{% endgeneration %}"
)
# As Qwen3's: thinking only in the turns after the last user message, an empty block where a message has none, and the
# block in the prompt when thinking is off.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# The prompt opens the think block, the rendered answer has none: not what the model would have written.
PROMPT_OPENS_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
NO_SPECIAL = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


class Prepared:
    """One row through the target's template."""

    def __init__(
        self, target: Path, messages: Any, template_kwargs: dict[str, Any] | None = None, **fields: Any
    ) -> None:
        settings = {key: fields.pop(key) for key in ("turns", "max_tokens", "mask_token_id") if key in fields}
        config = PrepareConfig(
            inputs=[Path("a.jsonl")],
            output=Path("out"),
            model=str(target),
            template_kwargs=template_kwargs or {},
            **settings,
        )
        self.chat = ChatTokenizer(config.model, config.template_kwargs)
        row = Row("a.jsonl", 1, json.dumps({"messages": messages, **fields}).encode())
        self.chunk: Chunk = make_chunk([row], config, self.chat)
        self.documents = self.chunk.kept[0].documents if self.chunk.kept else []

    @property
    def reason(self) -> str:
        return self.chunk.dropped[0].reason

    def trained(self) -> list[list[str]]:
        """For each document its trained stretches as text."""
        return [[self._text(ids) for ids in self._stretches(document)] for document in self.documents]

    def _text(self, ids: list[int]) -> str:
        return str(self.chat.tokenizer.decode(ids))

    @staticmethod
    def _stretches(document: Any) -> list[list[int]]:
        stretches: list[list[int]] = []
        previous = False
        for token, trained in zip(document.input_ids.tolist(), document.loss_mask.tolist(), strict=True):
            if trained and not previous:
                stretches.append([])
            if trained:
                stretches[-1].append(token)
            previous = trained
        return stretches


def check_prompts_equal_serving(prepared: Prepared, messages: list[dict[str, Any]], **template_kwargs: Any) -> None:
    """The tokens before each answer must be what a server gives the model there."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    documents = prepared.documents if len(prepared.documents) > 1 else prepared.documents * len(answers)
    for place, document in zip(answers, documents, strict=True):
        prompt = prepared.chat.tokenizer.apply_chat_template(
            messages[:place], add_generation_prompt=True, return_dict=False, **template_kwargs
        )
        ids, mask = document.input_ids.tolist(), document.loss_mask.tolist()
        assert ids[: len(prompt)] == prompt
        assert not mask[len(prompt) - 1]
        assert any(mask[len(prompt) :])


def test_template_without_tags_trains_each_answer_and_its_end(make_target: Any) -> None:
    prepared = Prepared(make_target(), TWO_TURNS)
    assert prepared.trained() == [["Hello<|im_end|>", "Because.<|im_end|>"]]
    check_prompts_equal_serving(prepared, TWO_TURNS)


def test_turns_last_trains_the_last_answer_only(make_target: Any) -> None:
    assert Prepared(make_target(), TWO_TURNS, turns="last").trained() == [["Because.<|im_end|>"]]
    assert Prepared(make_target(THINKING), TWO_TURNS, turns="last").trained() == [["Because.<|im_end|>"]]


def test_smollm2_masks_and_prompts(smollm2: Path) -> None:
    prepared = Prepared(smollm2, TWO_TURNS)
    assert prepared.trained() == [["Hello<|im_end|>", "Because.<|im_end|>"]]
    check_prompts_equal_serving(prepared, TWO_TURNS)
    for content in [" leading", "\nline", "\n\n", "🙂 ünï", "<|im_end|>", "1"]:
        messages = [USER, {"role": "assistant", "content": content}]
        prepared = Prepared(smollm2, messages)
        if prepared.documents:
            check_prompts_equal_serving(prepared, messages)
            assert prepared.trained() == [[content + "<|im_end|>"]]
        else:  # two line ends would be one token: refused rather than trained wrongly
            assert prepared.reason == "prompt_tokens_differ"


def test_case_02_tags_that_cover_nothing_or_everything(make_target: Any) -> None:
    assert Prepared(make_target(TAGS_COVER_NOTHING), TWO_TURNS).reason == "generation_tags_cover_nothing"
    assert Prepared(make_target(TAGS_COVER_ALL), TWO_TURNS).reason == "generation_tags_cover_all"


def test_case_03_template_rewrites_history(make_target: Any) -> None:
    messages = [
        USER,
        {**ANSWER, "reasoning_content": "greet"},
        TWO_TURNS[2],
        {**TWO_TURNS[3], "reasoning_content": "explain"},
    ]
    prepared = Prepared(make_target(THINKING), messages)
    assert prepared.trained() == [
        ["<think>\ngreet\n</think>\n\nHello<|im_end|>"],
        ["<think>\nexplain\n</think>\n\nBecause.<|im_end|>"],
    ]
    check_prompts_equal_serving(prepared, messages)
    assert "greet" not in prepared.chat.tokenizer.decode(prepared.documents[1].input_ids)


def test_case_03_prompt_that_the_answered_text_does_not_keep(make_target: Any) -> None:
    assert Prepared(make_target(PROMPT_OPENS_THINKING), TWO_TURNS).reason == "prompt_not_a_prefix"


def test_case_03_tool_loop_keeps_its_thinking_in_one_document(make_target: Any) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": "call", "reasoning_content": "one"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "three", "reasoning_content": "two"},
    ]
    assert Prepared(make_target(THINKING), messages).trained() == [
        ["<think>\none\n</think>\n\ncall<|im_end|>", "<think>\ntwo\n</think>\n\nthree<|im_end|>"]
    ]


def test_case_04_empty_think_block_of_the_template_is_not_trained(make_target: Any) -> None:
    target = make_target(THINKING)
    assert Prepared(target, [USER, ANSWER]).trained() == [["Hello<|im_end|>"]]
    own = [USER, {"role": "assistant", "content": "<think>\n\n</think>\n\nHello"}]
    assert Prepared(make_target(), own).trained() == [["<think>\n\n</think>\n\nHello<|im_end|>"]]


def test_case_05_end_of_turn_outside_the_tags_is_trained(make_target: Any) -> None:
    prepared = Prepared(make_target(TAGGED), TWO_TURNS)
    assert prepared.trained() == [["Hello<|im_end|>", "Because.<|im_end|>"]]
    check_prompts_equal_serving(prepared, TWO_TURNS)


def test_case_05_answer_cut_at_a_limit_does_not_train_its_end(make_target: Any) -> None:
    assert Prepared(make_target(), TWO_TURNS, finished=False).trained() == [["Hello<|im_end|>", "Because."]]
    assert Prepared(make_target(TAGGED), TWO_TURNS, finished=False).trained() == [["Hello<|im_end|>", "Because."]]


def test_case_06_template_arguments_reach_the_template(make_target: Any) -> None:
    prepared = Prepared(make_target(THINKING), TWO_TURNS, {"enable_thinking": False})
    # The block is in every prompt, but earlier turns lose it: one document for each answer.
    assert prepared.trained() == [["Hello<|im_end|>"], ["Because.<|im_end|>"]]
    check_prompts_equal_serving(prepared, TWO_TURNS, enable_thinking=False)


def test_user_who_writes_special_tokens(make_target: Any) -> None:
    messages = [{"role": "user", "content": "a<|im_end|>\n<|im_start|>assistant\nb"}, ANSWER]
    for template in (TAGGED, None):
        prepared = Prepared(make_target(*([template] if template else [])), messages)
        assert prepared.trained() == [["Hello<|im_end|>"]]
        check_prompts_equal_serving(prepared, messages)
    inside = [USER, {"role": "assistant", "content": "say <|im_end|> now"}]
    assert Prepared(make_target(), inside).trained() == [["say <|im_end|> now<|im_end|>"]]


def test_template_without_special_tokens(make_target: Any) -> None:
    prepared = Prepared(make_target(NO_SPECIAL, special=False), TWO_TURNS)
    assert prepared.trained() == [["Hello", "Because."]]
    check_prompts_equal_serving(prepared, TWO_TURNS)


def test_token_across_the_start_of_the_answer_is_refused(make_target: Any) -> None:
    target = make_target(merges=[("Ċ", "H")])  # line end and H are one token
    assert Prepared(target, [USER, ANSWER]).reason == "prompt_tokens_differ"
    assert Prepared(target, [USER, {"role": "assistant", "content": "Yes"}]).trained() == [["Yes<|im_end|>"]]


def test_case_08_nothing_trainable(make_target: Any) -> None:
    target = make_target()
    assert Prepared(target, [USER, {"role": "assistant", "content": ""}]).reason == "nothing_trainable"
    assert Prepared(target, [USER, ANSWER], max_tokens=10).reason == "nothing_trainable"
    one_token = Prepared(target, [USER, {"role": "assistant", "content": "y"}])
    assert one_token.trained() == [["y<|im_end|>"]]
    assert one_token.documents[0].first_anchor == len(one_token.documents[0].input_ids) - 3


def test_case_08_cut_is_counted_only_when_something_is_lost(make_target: Any) -> None:
    target = make_target()
    whole = Prepared(target, [USER, ANSWER]).documents[0]
    length = len(whole.input_ids)
    assert not whole.cut
    assert not Prepared(target, [USER, ANSWER], max_tokens=length).documents[0].cut
    shorter = Prepared(target, [USER, ANSWER], max_tokens=length - 3)
    assert shorter.documents[0].cut
    assert shorter.trained() == [["Hell"]]


def test_case_09_mask_token_in_the_text(make_target: Any) -> None:
    target = make_target()
    idle = ChatTokenizer(str(target), {}).tokenizer.convert_tokens_to_ids("<|idle|>")
    messages = [{"role": "user", "content": "what is <|idle|>?"}, ANSWER]
    assert Prepared(target, messages, mask_token_id=idle).reason == "mask_token_in_text"
    assert Prepared(target, TWO_TURNS, mask_token_id=idle).trained()


def test_lone_surrogate_drops_the_row(make_target: Any) -> None:
    assert Prepared(make_target(), [USER, {"role": "assistant", "content": "\ud83d"}]).reason == "not_unicode"


def test_template_that_refuses_drops_the_row(make_target: Any) -> None:
    target = make_target("{{ raise_exception('no such thing') }}")
    prepared = Prepared(target, TWO_TURNS)
    assert prepared.reason == "template_refuses"
    assert "no such thing" in prepared.chunk.dropped[0].detail


def test_tokenizer_without_template_names_the_remedy(make_target: Any) -> None:
    with pytest.raises(UserError, match="has no chat template"):
        Prepared(make_target(None), TWO_TURNS)


def test_folder_without_tokenizer_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No tokenizer could be loaded"):
        Prepared(tmp_path, TWO_TURNS)
