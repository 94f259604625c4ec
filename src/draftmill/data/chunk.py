"""Some hundred rows at once: rows → documents and drops. The same rows give the same chunk in every process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from draftmill.data.config import PrepareConfig
from draftmill.data.read import Row, RowError, parse
from draftmill.data.render import Document, Draft, make_document, make_drafts, token_row_document
from draftmill.data.rules import TokenRow, check_conversation, check_tokens, slice_name
from draftmill.data.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Drop:
    """A row left out, and why."""

    source: str
    row: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class RowDocuments:
    """The documents of one kept row."""

    source: str
    row: int
    slice_name: str
    documents: list[Document]


@dataclass(slots=True)
class Chunk:
    """What became of some rows, in their order."""

    rows: int = 0
    trailing_removed: int = 0
    kept: list[RowDocuments] = field(default_factory=list)
    dropped: list[Drop] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checked row whose text is not tokenised yet."""

    row: Row
    slice_name: str
    trailing_removed: int
    content: TokenRow | list[Draft]


def make_chunk(rows: list[Row], config: PrepareConfig, chat: ChatTokenizer) -> Chunk:
    """All texts of the rows are tokenised in one call. Raises UserError only for what concerns every row."""
    chunk = Chunk(rows=len(rows))
    pending: list[_Pending | Drop] = [_checked(row, config, chat) for row in rows]
    drafts = [draft for item in pending if isinstance(item, _Pending) for draft in _drafts(item)]
    encodings = iter(chat.encode([draft.text for draft in drafts]))
    for item in pending:
        outcome = item if isinstance(item, Drop) else _finished(item, encodings, config, chat)
        if isinstance(outcome, Drop):
            chunk.dropped.append(outcome)
        else:
            chunk.kept.append(outcome)
            chunk.trailing_removed += item.trailing_removed if isinstance(item, _Pending) else 0
    return chunk


def _drafts(item: _Pending) -> list[Draft]:
    return item.content if isinstance(item.content, list) else []


def _drop(row: Row, error: RowError) -> Drop:
    return Drop(row.source, row.row, error.reason, error.detail)


def _checked(row: Row, config: PrepareConfig, chat: ChatTokenizer) -> _Pending | Drop:
    try:
        content = parse(row)
        if content.get("input_ids") is not None:
            return _Pending(row, slice_name(content, row.source), 0, check_tokens(content, chat.vocab_size))
        checked = check_conversation(content, row.source, row.row)
        drafts = make_drafts(checked, chat, config.turns)
        return _Pending(row, checked.conversation.slice_name, checked.trailing_removed, drafts)
    except RowError as error:
        return _drop(row, error)


def _finished(
    item: _Pending, encodings: Iterator[object], config: PrepareConfig, chat: ChatTokenizer
) -> RowDocuments | Drop:
    mine = [next(encodings) for _ in _drafts(item)]  # taken first: a drop must not leave them to the next row
    try:
        documents = _documents(item, mine, config, chat)
        _check_mask_token(documents, config.mask_token_id)
    except RowError as error:
        return _drop(item.row, error)
    return RowDocuments(item.row.source, item.row.row, item.slice_name, documents)


def _documents(item: _Pending, encodings: list[object], config: PrepareConfig, chat: ChatTokenizer) -> list[Document]:
    if isinstance(item.content, TokenRow):
        made = [token_row_document(item.content, config.max_tokens)]
    else:
        drafts = zip(item.content, encodings, strict=True)
        made = [make_document(draft, encoding, chat, config.max_tokens) for draft, encoding in drafts]
    documents = [document for document in made if document is not None]
    if not documents:
        limit = f" within the first {config.max_tokens} tokens" if config.max_tokens is not None else ""
        raise RowError("nothing_trainable", f"no two neighbouring tokens are the assistant's{limit}")
    return documents


def _check_mask_token(documents: list[Document], mask_token_id: int | None) -> None:
    if mask_token_id is None:
        return
    for document in documents:
        places: npt.NDArray[np.int64] = np.flatnonzero(document.input_ids == mask_token_id)
        if len(places):
            raise RowError("mask_token_in_text", f"token {places[0]} of the text is the mask token {mask_token_id}")
