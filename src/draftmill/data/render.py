"""Conversation → documents: token ids and the mask of what the target itself would write.

An answer is the text between what a server would give the model at that point (the prompt) and the end of the
turn. Where that cannot be made out for certain, RowError is raised: never a wrong mask.

Legend: n = tokens of a document; positions in text are characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from draftmill.data.read import RowError
from draftmill.data.rules import CheckedConversation, Message, TokenRow
from draftmill.data.tokenizer import ChatTokenizer, Rendered

EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Answer:
    """One assistant turn to train, in characters of its draft's text.

    start      where the answer begins, which is the length of the prompt
    end        where the turn's text ends
    untrained  characters at the start that the template itself put in (an empty think block)
    tags       parts inside the template's generation tags; None when it has none
    finished   False: the end-of-turn token is the template's, not the model's
    """

    start: int
    end: int
    untrained: int
    tags: tuple[tuple[int, int], ...] | None
    finished: bool


@dataclass(frozen=True, slots=True)
class Draft:
    """A document before tokenisation."""

    text: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """input_ids [n] int32, loss_mask [n] bool. `first_anchor`: first p with loss_mask[p] and loss_mask[p+1]."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    first_anchor: int
    cut: bool


def make_drafts(checked: CheckedConversation, chat: ChatTokenizer, turns: Literal["all", "last"]) -> list[Draft]:
    """One draft when the whole text keeps every turn as it was served, else one draft for each assistant turn.

    Templates that drop the thinking of earlier turns show the model another history each time it answers.
    """
    messages, tools = checked.conversation.messages, checked.conversation.tools
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    places = places if turns == "all" else places[-1:]
    whole = chat.render(messages, tools)
    uptos = [chat.render(messages[: place + 1], tools) for place in places[:-1]] + [whole]
    answers = [_answer(checked, chat, place, upto) for place, upto in zip(places, uptos, strict=True)]
    if not all(whole.text.startswith(upto.text) for upto in uptos):
        return [Draft(upto.text, (answer,)) for upto, answer in zip(uptos, answers, strict=True)]
    return [Draft(whole.text, tuple(answers))]


def _answer(checked: CheckedConversation, chat: ChatTokenizer, place: int, upto: Rendered) -> Answer:
    messages = checked.conversation.messages
    prompt = chat.render_prompt(messages[:place], checked.conversation.tools)
    if not upto.text.startswith(prompt):
        raise RowError(
            "prompt_not_a_prefix",
            f"what a server gives the model before message {place + 1} ends in {prompt[-40:]!r}, "
            "but the template renders the answered conversation otherwise; check template_kwargs",
        )
    last = place == len(messages) - 1
    return Answer(
        start=len(prompt),
        end=len(upto.text),
        untrained=_inserted_thinking(messages[place], upto.text, len(prompt)),
        tags=_tags_of_answer(upto, len(prompt), place),
        finished=checked.finished or not last,
    )


def _inserted_thinking(message: Message, text: str, start: int) -> int:
    """Length of an empty think block at the start of the answer that the message itself does not have."""
    block = EMPTY_THINKING.match(text, start)
    if block is None or EMPTY_THINKING.match(message["content"].lstrip()):
        return 0
    return block.end() - start


def _tags_of_answer(rendered: Rendered, start: int, place: int) -> tuple[tuple[int, int], ...] | None:
    """The tagged parts after the prompt. A template whose tags mark nothing, or all the text, marks no answers."""
    if rendered.tags is None:
        return None
    tagged = sum(end - begin for begin, end in rendered.tags)
    if tagged >= len(rendered.text.strip()):
        raise RowError("generation_tags_cover_all", "the template's generation tags enclose the whole text")
    parts = tuple((max(begin, start), end) for begin, end in rendered.tags if end > start and end > begin)
    if not parts:
        raise RowError("generation_tags_cover_nothing", f"the generation tags leave out message {place + 1}")
    return parts


def make_document(draft: Draft, encoding: Any, chat: ChatTokenizer, max_tokens: int | None) -> Document | None:
    """The draft's document, cut to max_tokens; None when nothing in it can be trained.

    encoding: the `tokenizers.Encoding` of the draft's text.
    """
    ids = np.array(encoding.ids, dtype=np.int32)
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = np.ascontiguousarray(offsets[:, 0]), np.ascontiguousarray(offsets[:, 1])
    mask = np.zeros(len(ids), dtype=np.bool_)
    for answer in draft.answers:
        _mark_answer(mask, answer, draft.text, ids, starts, ends, chat)
    return cut_document(ids, mask, max_tokens)


def cut_document(ids: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_], max_tokens: int | None) -> Document | None:
    """The first max_tokens tokens; None when no two neighbouring tokens there are trained."""
    cut = max_tokens is not None and len(ids) > max_tokens
    ids, mask = ids[:max_tokens], mask[:max_tokens]
    anchors = mask[:-1] & mask[1:]
    return Document(ids, mask, int(anchors.argmax()), cut) if anchors.any() else None


def token_row_document(row: TokenRow, max_tokens: int | None) -> Document | None:
    """The document of a row that came tokenised."""
    return cut_document(row.input_ids, row.loss_mask, max_tokens)


def _mark_answer(
    mask: npt.NDArray[np.bool_],
    answer: Answer,
    text: str,
    ids: npt.NDArray[np.int32],
    starts: Positions,
    ends: Positions,
    chat: ChatTokenizer,
) -> None:
    first = _prompt_tokens(answer.start, text, ids, starts, chat)
    stop, end_of_turn = _answer_stop(answer, text, first, ids, starts, ends, chat)
    if answer.untrained:
        first = max(first, int(np.searchsorted(starts, answer.start + answer.untrained)))
    if answer.tags is None:
        mask[first:stop] = True
    else:
        for begin, end in answer.tags:
            mask[max(first, int(np.searchsorted(starts, begin))) : min(stop, int(np.searchsorted(starts, end)))] = True
    if end_of_turn:
        # Templates often leave the end-of-turn token just outside their tags; without it a drafter never stops.
        mask[stop] = answer.finished and mask[stop - 1]


def _prompt_tokens(start: int, text: str, ids: npt.NDArray[np.int32], starts: Positions, chat: ChatTokenizer) -> int:
    """How many tokens the prompt has. Raises RowError when alone it would have other tokens than in the whole text.

    Tokenizers split at special tokens first, so only the text after the last of them can come out differently.
    """
    before = int(np.searchsorted(starts, start))
    special = np.flatnonzero(chat.is_special[ids[:before]])
    begin = int(special[-1]) if len(special) else 0
    begin_character = int(starts[begin]) if len(special) else 0
    tail = chat.encode_again(text[begin_character:start])
    count = begin + len(tail)
    if not np.array_equal(ids[begin:count], tail):
        raise RowError(
            "prompt_tokens_differ",
            f"the answer's first characters {text[start : start + 10]!r} change the tokens of the prompt's end "
            f"{text[max(0, start - 10) : start]!r}",
        )
    return count


def _answer_stop(
    answer: Answer,
    text: str,
    first: int,
    ids: npt.NDArray[np.int32],
    starts: Positions,
    ends: Positions,
    chat: ChatTokenizer,
) -> tuple[int, bool]:
    """(stop, True): the answer's tokens are first…stop−1 and token `stop` ends the turn. False: no such token.

    The end of turn is the answer's last special token when only white space follows it. That white space is the
    template's and not trained.
    """
    limit = int(np.searchsorted(starts, answer.end))
    special = np.flatnonzero(chat.is_special[ids[first:limit]])
    if len(special):
        last = first + int(special[-1])
        if not text[ends[last] : answer.end].strip():
            return last, True
    return int(np.searchsorted(starts, len(text[: answer.end].rstrip()))), False
