"""The records that cross a boundary between folders: typed, immutable, self-describing.

Legend: T = token budget (fixed length of a batch), K = tapped layers, H = hidden size of the target.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PADDING_DOCUMENT = -1


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation as the chat template takes it, and where it came from.

    `messages`: dicts with `role` and `content` (and `tool_calls`, `reasoning_content`, … where the row has them).
    `tools`: tool schemas for the template, or None. `source`: the file's name. `row`: its 1-based row number there.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    source: str
    row: int
    slice_name: str = ""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Documents packed one after another into T tokens, right-padded. All tensors live on the CPU.

    input_ids    [T] int32   token ids; padding holds 0
    loss_mask    [T] bool    True where the target itself would produce the token (assistant turns)
    position_ids [T] int32   place in its document, restarting at 0; 0 in the padding
    document_ids [T] int32   0, 1, 2 … in the order of the batch; −1 in the padding
    documents                for each document its number in the prepared set, for messages that name it
    index                    the batch's place in the plan of the whole run
    bin                      which fixed group of documents this is: the same bin has the same tokens in every epoch
    epoch                    0-based
    """

    input_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    document_ids: Tensor
    documents: tuple[int, ...]
    index: int
    bin: int
    epoch: int

    @property
    def token_budget(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def tokens(self) -> int:
        """Number of real tokens (without padding)."""
        return int((self.document_ids != PADDING_DOCUMENT).sum())

    def spans(self) -> list[tuple[int, int]]:
        """(start, end) of each document in the batch, in order."""
        lengths = torch.bincount(self.document_ids[self.document_ids >= 0], minlength=len(self.documents)).tolist()
        ends = torch.tensor(lengths).cumsum(0).tolist()
        return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class HiddenBatch:
    """A token batch with the target's hidden states.

    features     [T, K·H]    outputs of the tapped decoder layers side by side, in tap order; zero in the padding
    final_hidden [T, H]      post-norm last hidden state, only when a loss needs the teacher's distribution
    target_fingerprint       which weights made them
    taps                     0-based ids of the tapped decoder layers
    """

    tokens: TokenBatch
    features: Tensor
    target_fingerprint: str
    taps: tuple[int, ...]
    final_hidden: Tensor | None = field(default=None)
