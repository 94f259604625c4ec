"""Showing what would be trained, before anything is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np

from draftmill.data.chunk import make_chunk
from draftmill.data.config import PrepareConfig
from draftmill.data.read import RowReader, source_names
from draftmill.data.render import Document
from draftmill.data.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class PreviewDocument:
    """A document as text, in pieces (text, trained), or why its row is left out (then without pieces)."""

    source: str
    row: int
    pieces: list[tuple[str, bool]]
    dropped: str = ""


def preview(config: PrepareConfig, rows: int) -> list[PreviewDocument]:
    """The first `rows` rows as they would be trained; a row may give several documents."""
    chat = ChatTokenizer(config.model, config.template_kwargs)
    chunk = make_chunk(list(islice(RowReader(config.inputs), rows)), config, chat)
    shown = [PreviewDocument(drop.source, drop.row, [], f"{drop.reason}: {drop.detail}") for drop in chunk.dropped]
    for kept in chunk.kept:
        shown += [PreviewDocument(kept.source, kept.row, _pieces(document, chat)) for document in kept.documents]
    order = source_names(config.inputs)
    return sorted(shown, key=lambda item: (order.index(item.source), item.row))


def _pieces(document: Document, chat: ChatTokenizer) -> list[tuple[str, bool]]:
    changes = np.flatnonzero(np.diff(document.loss_mask)) + 1
    return list(_decoded(document, [0, *changes.tolist(), len(document.input_ids)], chat))


def _decoded(document: Document, edges: list[int], chat: ChatTokenizer) -> Iterator[tuple[str, bool]]:
    for start, end in pairwise(edges):
        yield chat.tokenizer.decode(document.input_ids[start:end]), bool(document.loss_mask[start])


def print_preview(documents: list[PreviewDocument]) -> None:
    """Prints to stdout: trained text on green, the rest dim."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for document in documents:
        console.rule(f"{document.source} row {document.row}")
        if document.dropped:
            console.print(Text(f"dropped, {document.dropped}", style="red"))
            continue
        text = Text()
        for piece, trained in document.pieces:
            text.append(piece, style="black on green" if trained else "dim")
        console.print(text)
