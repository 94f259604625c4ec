"""Decoding and training draft the same; planted mistakes are flagged."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from draftmill.drafter import attention
from draftmill.drafter.model import Drafter
from draftmill.evaluate.agreement import NothingDrafted, agreement, plain_features
from draftmill.evaluate.draft import Proposer

NEW = 40


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama(5)


@pytest.fixture(scope="module")
def inputs() -> list[Tensor]:
    return tiny.prompts(3, seed=1)


@pytest.fixture(scope="module")
def trained(target: Any, inputs: list[Tensor]) -> Drafter:
    mixed = ("sliding_attention", "full_attention")
    return tiny.trained(target, inputs, new_tokens=NEW, layer_types=mixed, layer_causal=(True, False), sliding_window=6)


def test_case_22_decoding_drafts_what_training_scores(target: Any, trained: Drafter, inputs: list[Tensor]) -> None:
    got = agreement(target, trained, inputs, NEW)
    assert got.tau_decoded > 2.5  # the drafter did learn, so the comparison says something
    assert got.tau_decoded == got.tau_training
    assert got.blocks_agree == got.proposals_agree == 1.0
    assert got.first is None
    assert not got.flagged
    assert got.to_dict()["blocks"] == got.blocks


def test_hybrid_target_agrees() -> None:
    got = agreement(tiny.hybrid(5), tiny.drafter(), tiny.prompts(2), 20)
    assert not got.flagged


def test_case_22_a_tap_off_by_one_is_flagged(target: Any, trained: Drafter, inputs: list[Tensor]) -> None:
    """Training captured the input of the tapped layers instead of their output."""
    got = agreement(target, trained, inputs, NEW, features=lambda ids: plain_features(target, ids, (0, 2)))
    assert got.flagged
    assert got.first is not None


def test_case_22_context_with_the_anchor_itself_is_flagged(
    target: Any, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training lets blocks see the hidden state at p, which inference does not have."""
    rule = attention.visible

    def leaking(blocks: Any, *rest: Any, **kind: Any) -> Tensor:
        return rule(type(blocks)(blocks.anchors + 1, *blocks.tensors()[1:]), *rest, **kind)

    monkeypatch.setattr(attention, "visible", leaking)
    assert agreement(target, tiny.drafter(), inputs, NEW).flagged  # full attention: the decoder needs no mask


def test_case_22_decoding_one_position_late_is_flagged(
    target: Any, trained: Drafter, inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder forgot the newest context position: the answer is still right, the acceptance is not."""
    logits = Proposer.logits

    def late(self: Proposer, bonus: int, slots: int) -> Tensor:
        self.length -= 1
        try:
            return logits(self, bonus, slots)
        finally:
            self.length += 1

    monkeypatch.setattr(Proposer, "logits", late)
    assert agreement(target, trained, inputs, NEW).flagged


def test_an_untrained_drafter_is_compared_by_its_proposals(target: Any, inputs: list[Tensor]) -> None:
    random = tiny.drafter()
    assert not agreement(target, random, inputs, NEW).flagged
    got = agreement(target, random, inputs, NEW, features=lambda ids: plain_features(target, ids, (0, 2)))
    assert got.flagged
    assert got.proposals_agree < 0.9


def test_nothing_drafted_is_an_error(target: Any) -> None:
    with pytest.raises(NothingDrafted):
        agreement(target, tiny.drafter(), tiny.prompts(1), 1)


def test_training_path_leaves_no_hooks(target: Any) -> None:
    with torch.no_grad():
        assert plain_features(target, tiny.prompts(1)[0], (1, 3)).shape == (13, 2 * tiny.HIDDEN)
    assert not any(layer._forward_hooks for layer in target.model.layers)
