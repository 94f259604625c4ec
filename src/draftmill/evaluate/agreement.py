"""Does real decoding propose what training scores? Both paths are run over the same answers and compared.

Training sees whole documents under a mask; decoding sees a growing cache. A mistake in one of them (a layer off by one,
a hidden state it cannot have yet, another mask) leaves the loss fine and the acceptance poor. Here the blocks of real
answers are drafted a second time through the training path and compared block by block.

Legend: n tokens of prompt and answer, N blocks, B block size, K taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftmill.drafter import attention
from draftmill.drafter.blocks import make_blocks
from draftmill.drafter.model import Drafter
from draftmill.drafter.objective import block_hidden
from draftmill.evaluate.decode import Block, decode
from draftmill.evaluate.target import Taps, rounding
from draftmill.target.model import shared_matrices

BLOCK_TOLERANCE = 0.05  # share of blocks whose accepted length may differ
PROPOSAL_TOLERANCE = 0.01  # share of proposals that may differ by more than rounding

Features = Callable[[Tensor], Tensor]  # input_ids [n] int64 → features [n, K·H]


class NothingDrafted(ValueError):  # noqa: N818
    """The answers are too short for a single drafted token, so there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """prompt: 0-based. block: 0-based in its answer. start: position of its bonus token."""

    prompt: int
    block: int
    start: int
    decoded: int
    training: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """Both paths over the same blocks.

    tau_*: mean over the blocks of accepted + 1. blocks_agree: share of blocks with the same accepted length.
    proposals_agree: share of drafted tokens that the training path drafts too, or holds for as good within rounding;
    it also tells while nothing is accepted yet. first: the first block whose lengths differ. flagged: the paths differ
    by more than rounding, so what training reports is not what serving gets.
    """

    blocks: int
    tau_decoded: float
    tau_training: float
    blocks_agree: float
    proposals_agree: float
    first: Disagreement | None
    flagged: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def agreement(
    model: nn.Module,
    drafter: Drafter,
    prompts_ids: Sequence[Tensor],
    max_new_tokens: int,
    *,
    stop_ids: frozenset[int] = frozenset(),
    features: Features | None = None,
) -> Agreement:
    """Decode prompts [n] int64 each greedily, then draft the same blocks through the training path.

    features: how training gets its hidden states; left out, from one plain forward pass of `model`. Passing the
    training's own capture also compares the taps. `drafter` lies on the model's device, in its dtype. Raises
    NothingDrafted when no answer is long enough.
    """
    capture = features if features is not None else lambda ids: plain_features(model, ids, drafter.spec.taps)
    _, head = shared_matrices(model)
    pairs: list[_Pair] = []
    for prompt, ids in enumerate(prompts_ids):
        decoded = decode(model, drafter, ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        blocks = [block for block in decoded.blocks if block.drafted]
        if not blocks:
            continue
        whole = torch.cat((ids, ids.new_tensor(decoded.tokens)))
        hidden = training_hidden(model, drafter, whole, capture(whole), [block.start for block in blocks])
        pairs += [_pair(prompt, k, block, hidden[k], head, whole.tolist()) for k, block in enumerate(blocks)]
    return _summary(pairs)


@dataclass(frozen=True, slots=True)
class _Pair:
    """One block on both paths. beyond: number of drafted tokens that differ by more than rounding."""

    prompt: int
    number: int
    block: Block
    training: int
    beyond: int

    @property
    def lengths_differ(self) -> bool:
        return self.block.accepted != self.training


def _pair(prompt: int, number: int, block: Block, hidden: Tensor, head: Tensor, answer: list[int]) -> _Pair:
    """hidden [B, H] and head [V, H]: the training path; answer: prompt and answer, its labels."""
    logits = (hidden[1 : block.drafted + 1] @ head.T).float()
    best, choice = logits.max(dim=-1)
    labels = choice.new_tensor(answer[block.start + 1 : block.start + 1 + block.drafted])
    right = choice[: len(labels)] == labels
    decoded = logits.gather(-1, choice.new_tensor(block.proposals)[:, None]).squeeze(-1)
    beyond = best - decoded > rounding(head.dtype) * logits.abs().amax(dim=-1)
    return _Pair(prompt, number, block, int(right.long().cumprod(dim=0).sum()), int(beyond.sum()))


def _summary(pairs: list[_Pair]) -> Agreement:
    count, drafted = len(pairs), sum(pair.block.drafted for pair in pairs)
    if not count:
        raise NothingDrafted("no block was drafted: answers end with their first token or are cut before their third")
    differing = [pair for pair in pairs if pair.lengths_differ]
    beyond_blocks = sum(pair.beyond > 0 for pair in differing)
    beyond = sum(pair.beyond for pair in pairs) / drafted
    return Agreement(
        blocks=count,
        tau_decoded=sum(pair.block.accepted + 1 for pair in pairs) / count,
        tau_training=sum(pair.training + 1 for pair in pairs) / count,
        blocks_agree=1 - len(differing) / count,
        proposals_agree=1 - beyond,
        first=_disagreement(differing[0]) if differing else None,
        flagged=beyond_blocks > BLOCK_TOLERANCE * count or beyond > PROPOSAL_TOLERANCE,
    )


def _disagreement(pair: _Pair) -> Disagreement:
    return Disagreement(pair.prompt, pair.number, pair.block.start, pair.block.accepted, pair.training)


def plain_features(model: nn.Module, input_ids: Tensor, taps: tuple[int, ...]) -> Tensor:
    """Features [n, K·H] of input_ids [n] from one forward pass without a cache."""
    with Taps(model, taps) as hooks:
        model(input_ids=input_ids[None], use_cache=False, logits_to_keep=1)
        return hooks.take()


def training_hidden(
    model: nn.Module, drafter: Drafter, input_ids: Tensor, features: Tensor, starts: list[int]
) -> Tensor:
    """Hidden states [N, B, H] of the blocks at `starts`, all in one pass, as in training.

    input_ids [n], features [n, K·H].
    """
    spec = drafter.spec
    embedding, _ = shared_matrices(model)
    places = torch.arange(len(input_ids), device=input_ids.device)
    documents = torch.zeros_like(places)
    anchors = torch.tensor(starts, device=input_ids.device)
    blocks = make_blocks(
        input_ids,
        torch.ones_like(places, dtype=torch.bool),
        places,
        documents,
        anchors,
        block_size=spec.block_size,
        mask_token_id=spec.mask_token_id,
        gamma=1.0,
    )
    attend = attention.dense(spec, blocks, documents, places)
    return block_hidden(drafter, features, places, blocks, embedding, attend)
