"""Attention that keeps packed documents apart, and the layout that needs no such attention.

Packed: documents lie one after another in a single row; attention runs once per document, so a token sees its own
document only and the work grows with Σ length², not (Σ length)². Rows: each document is a right-padded row; a causal
model never looks right, so no mask is needed. Architectures with a recurrent state or a convolution over time leak
across packed documents and need rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

NAME = "draftmill_documents"
Spans = list[tuple[int, int]]

# Not cuDNN: it plans anew for every shape, and each document has its own (2.5 s a batch on an H200).
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_spans: ContextVar[Spans] = ContextVar("spans of the documents in the row being run")


@contextmanager
def documents(spans: Spans) -> Iterator[None]:
    """Within this context, packed attention keeps to these (start, end) spans."""
    token = _spans.set(spans)
    try:
        yield
    finally:
        _spans.reset(token)


def register() -> None:
    """Make the attention known to transformers under `NAME`. A name without mask function: no mask is built for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' own SDPA attention, document by document: query [1, heads, T, D] → [1, T, heads, D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    window = kwargs.get("sliding_window")
    out = []
    for start, end in _spans.get():
        q, k, v = (x[:, :, start:end] for x in (query, key, value))
        mask = _window_mask(end - start, window, q.device) if window and end - start > window else None
        with sdpa_kernel(BACKENDS):
            out.append(sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0])
    return torch.cat(out, dim=1), None


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    place = torch.arange(length, device=device)
    distance = place[:, None] - place[None, :]
    return ((distance >= 0) & (distance < window))[None, None]


def row_groups(spans: Spans, budget: int) -> list[list[int]]:
    """Group documents of like length into padded rows of at most `budget` tokens a group (at least one document)."""
    order = sorted(range(len(spans)), key=lambda d: spans[d][1] - spans[d][0])
    groups: list[list[int]] = []
    for document in order:
        length = spans[document][1] - spans[document][0]
        if groups and (len(groups[-1]) + 1) * length <= budget:
            groups[-1].append(document)
        else:
            groups.append([document])
    return groups
