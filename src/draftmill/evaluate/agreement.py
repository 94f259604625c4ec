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
from draftmill.evaluate.target import Taps, shared_matrices

BLOCK_TOLERANCE = 0.05  # share of blocks whose accepted length may differ, for rounding
PROPOSAL_TOLERANCE = 0.05  # share of proposals that may differ in float32
COARSE_PROPOSAL_TOLERANCE = 0.25  # … in 16 bits, where far slots are nearly flat and ties are common

Features = Callable[[Tensor], Tensor]  # input_ids [n] int64 → features [n, K·H]


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

    tau_*: mean over the blocks of accepted + 1. blocks_agree, proposals_agree: share of blocks with the same accepted
    length, and of drafted tokens that are the same (which also tells while nothing is accepted yet). first: the first
    block whose lengths differ. flagged: the paths differ by more than rounding, so what training reports is not what
    serving gets.
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
    training's own capture also compares the taps. `drafter` lies on the model's device.
    """
    capture = features if features is not None else lambda ids: plain_features(model, ids, drafter.spec.taps)
    pairs: list[_Pair] = []
    for prompt, ids in enumerate(prompts_ids):
        decoded = decode(model, drafter, ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
        blocks = [block for block in decoded.blocks if block.drafted]
        if not blocks:
            continue
        whole = torch.cat((ids, ids.new_tensor(decoded.tokens)))
        proposed = training_proposals(model, drafter, whole, capture(whole), [block.start for block in blocks]).tolist()
        pairs += [_pair(prompt, k, block, proposed[k], whole.tolist()) for k, block in enumerate(blocks)]
    return _summary(pairs, next(model.parameters()).dtype)


@dataclass(frozen=True, slots=True)
class _Pair:
    """One block on both paths. same: number of drafted tokens that are equal."""

    prompt: int
    number: int
    block: Block
    training: int
    same: int


def _pair(prompt: int, number: int, block: Block, proposed: list[int], answer: list[int]) -> _Pair:
    """proposed: the training path's tokens for slots 1 … B−1; answer: prompt and answer, its labels."""
    labels = answer[block.start + 1 : block.start + 1 + block.drafted]
    hits = [token == label for token, label in zip(proposed, labels, strict=False)]
    training = hits.index(False) if False in hits else len(hits)
    same = sum(a == b for a, b in zip(proposed, block.proposals, strict=False))
    return _Pair(prompt, number, block, training, same)


def _summary(pairs: list[_Pair], dtype: torch.dtype) -> Agreement:
    differing = [pair for pair in pairs if pair.block.accepted != pair.training]
    count, drafted = len(pairs), sum(pair.block.drafted for pair in pairs)
    if not count:
        raise ValueError("no block was drafted: answers end with their first token or are cut before their third")
    same = sum(pair.same for pair in pairs) / drafted
    tolerance = PROPOSAL_TOLERANCE if dtype == torch.float32 else COARSE_PROPOSAL_TOLERANCE
    return Agreement(
        blocks=count,
        tau_decoded=sum(pair.block.accepted + 1 for pair in pairs) / count,
        tau_training=sum(pair.training + 1 for pair in pairs) / count,
        blocks_agree=1 - len(differing) / count,
        proposals_agree=same,
        first=_disagreement(differing[0]) if differing else None,
        flagged=len(differing) > max(1, BLOCK_TOLERANCE * count) or same < 1 - tolerance,
    )


def _disagreement(pair: _Pair) -> Disagreement:
    return Disagreement(pair.prompt, pair.number, pair.block.start, pair.block.accepted, pair.training)


def plain_features(model: nn.Module, input_ids: Tensor, taps: tuple[int, ...]) -> Tensor:
    """Features [n, K·H] of input_ids [n] from one forward pass without a cache."""
    with Taps(model, taps) as hooks:
        model(input_ids=input_ids[None], use_cache=False, logits_to_keep=1)
        return hooks.take()


def training_proposals(
    model: nn.Module, drafter: Drafter, input_ids: Tensor, features: Tensor, starts: list[int]
) -> Tensor:
    """Drafted tokens [N, B−1] of the blocks at `starts`, all in one pass, as in training.

    input_ids [n], features [n, K·H].
    """
    spec = drafter.spec
    embedding, head = shared_matrices(model)
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
    hidden = block_hidden(drafter, features, places, blocks, embedding, attend)
    return (hidden[:, 1:] @ head.T).argmax(dim=-1)
