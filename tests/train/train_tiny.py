"""A tiny drafter, hidden batches with a given number of valid anchors, and a source of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftmill.drafter.config import FULL, DrafterSpec
from draftmill.drafter.model import Drafter, initialise
from draftmill.records import PADDING_DOCUMENT, HiddenBatch, TokenBatch
from draftmill.train.config import TrainConfig
from draftmill.train.parallel import Alone
from draftmill.train.step import StepSettings
from draftmill.train.trainer import Trainer

VOCAB, MASK = 40, 39
SPEC = DrafterSpec(
    hidden_size=16, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6,
    rope_theta=10000.0, block_size=4, mask_token_id=MASK, taps=(0, 2), layer_types=(FULL, FULL),
    layer_causal=(False, False), sliding_window=None, vocab_size=VOCAB, num_target_layers=4,
    max_position_embeddings=128,
)  # fmt: skip
SETTINGS = StepSettings(anchors=64, gamma=4.0, seed=0, dtype=torch.float32)
CONFIG = TrainConfig(dtype="float32", lr=1e-2, log_every=1, save_every=1000)


def make_drafter(seed: int = 0, **changes: Any) -> Drafter:
    drafter = Drafter(replace(SPEC, **changes))
    initialise(drafter, seed, std=0.2)
    return drafter


def matrix(seed: int = 0) -> Tensor:
    """The target's embedding, also used as its head: [V, H]."""
    return torch.randn(VOCAB, SPEC.hidden_size, generator=torch.Generator().manual_seed(seed))


def document(anchors: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, loss mask, features) of a document of 5 prompt tokens and exactly `anchors` valid anchors."""
    draw = torch.Generator().manual_seed(1000 + seed)
    answer = anchors + 1 if anchors else 0  # a run of n supervised tokens has n − 1 anchors
    ids = torch.randint(0, MASK, (5 + answer,), generator=draw, dtype=torch.int32)
    mask = torch.arange(5 + answer) >= 5
    features = torch.randn(5 + answer, 2 * SPEC.hidden_size, generator=draw)
    return ids, mask, features


def hidden_batch(anchors: list[int], *, first: int = 0, index: int = 0, padding: int = 3) -> HiddenBatch:
    """One batch of documents with these numbers of valid anchors; document d is `document(anchors[d], first + d)`."""
    made = [document(count, first + d) for d, count in enumerate(anchors)]
    ids, masks, features = (torch.cat(parts) for parts in zip(*made, strict=True))
    total = len(ids)
    places = [torch.arange(len(text), dtype=torch.int32) for text, _, _ in made]
    numbers = [torch.full((len(text),), d, dtype=torch.int32) for d, (text, _, _) in enumerate(made)]
    zeros = torch.zeros(padding, dtype=torch.int32)
    tokens = TokenBatch(
        input_ids=torch.cat((ids, zeros)),
        loss_mask=torch.cat((masks, zeros.bool())),
        position_ids=torch.cat((*places, zeros)),
        document_ids=torch.cat((*numbers, torch.full((padding,), PADDING_DOCUMENT, dtype=torch.int32))),
        documents=tuple(range(len(anchors))),
        index=index,
        bin=index,
        epoch=0,
    )
    assert len(tokens.spans()) == len(anchors)
    padded = torch.cat((features, torch.zeros(padding, features.shape[1])))
    assert padded.shape[0] == total + padding
    return HiddenBatch(tokens, padded, "cafe", SPEC.taps)


class FakeSource:
    """Batches by index, from a list of anchor counts; keeps a diary."""

    def __init__(
        self,
        batches: list[list[int]] | None = None,
        broken: set[int] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.batches, self.broken, self.should_stop = batches, broken or set(), should_stop
        self.diary: list[tuple[str, int]] = []

    def take(self, index: int) -> HiddenBatch | None:
        if self.should_stop():
            return None
        self.diary.append(("take", index))
        counts = [3, 2] if self.batches is None else self.batches[index % len(self.batches)]
        batch = hidden_batch(counts, first=10 * index, index=index)
        return replace(batch, features=batch.features * torch.nan) if index in self.broken else batch

    def release(self, index: int) -> None:
        self.diary.append(("release", index))


def make_trainer(folder: Path, source: FakeSource, total_steps: int, **changes: Any) -> Trainer:
    source.should_stop = changes.pop("should_stop", source.should_stop)
    options: dict[str, Any] = {
        "drafter": make_drafter(),
        "config": CONFIG,
        "settings": SETTINGS,
        "on_log": lambda _: None,
        "on_save": lambda _: None,
        "parallel": Alone(),
        "provenance": {"made_by": "a test"},
    }
    return Trainer(
        source=source, total_steps=total_steps, embedding=matrix(), head=matrix(), folder=folder, **(options | changes)
    )


def gradients(drafter: Drafter) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


def weights(drafter: Drafter) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in drafter.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bit-equal, NaN included."""
    return first.keys() == second.keys() and all(
        torch.equal(first[name].reshape(-1).view(torch.uint8), second[name].reshape(-1).view(torch.uint8))
        for name in first
    )
