"""Greedy speculative decoding gives the target's own answer, whatever the drafter proposes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from draftmill.drafter import attention
from draftmill.drafter.blocks import Blocks
from draftmill.errors import UserError
from draftmill.evaluate.acceptance import acceptance
from draftmill.evaluate.decode import Block, decode
from draftmill.evaluate.draft import Proposer, block_attend, block_mask
from draftmill.evaluate.plain import plain
from draftmill.evaluate.target import CachedTarget

MIXED = {
    "layer_types": ("sliding_attention", "full_attention"),
    "layer_causal": (True, False),
    "sliding_window": 6,
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama()


def oracle(monkeypatch: pytest.MonkeyPatch, answers: list[int], wrong_at: set[int]) -> None:
    """Proposals are the target's own tokens, except at the given slots of the whole sequence."""

    def logits(self: Proposer, bonus: int, slots: int) -> Tensor:
        out = torch.zeros(slots, tiny.VOCAB)
        for slot in range(slots):
            place = self.length + 1 + slot
            token = answers[place] if place < len(answers) else 0
            out[slot, (token + 1) % tiny.VOCAB if place in wrong_at else token] = 1.0
        return out

    monkeypatch.setattr(Proposer, "logits", logits)


@pytest.mark.parametrize(
    "target", [tiny.llama(1), tiny.sliding(1, window=8), tiny.hybrid(1)], ids=lambda m: type(m).__name__
)
def test_lossless_with_a_random_drafter(target: Any) -> None:
    for ids in tiny.prompts(4, length=21):
        fast = decode(target, tiny.drafter(), ids, max_new_tokens=30)
        assert fast.tokens == plain(target, ids, max_new_tokens=30).tokens


@pytest.mark.parametrize("make", [tiny.llama, tiny.sliding, tiny.hybrid])
def test_lossless_where_some_drafts_are_accepted(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rollback length occurs, from none accepted to all."""
    target, ids = make(2), tiny.prompts(1, length=19)[0]
    expected = plain(target, ids, max_new_tokens=40).tokens
    oracle(monkeypatch, [*ids.tolist(), *expected], wrong_at={22, 27, 29, 30, 36, 44})
    fast = decode(target, tiny.drafter(), ids, max_new_tokens=40)
    assert fast.tokens == expected
    assert {0, 1, 4} <= set(fast.accepted)


def test_case_15b_hybrid_is_replayed_and_dense_is_cropped() -> None:
    assert CachedTarget(tiny.hybrid()).replays
    assert not CachedTarget(tiny.llama()).replays
    assert not CachedTarget(tiny.sliding()).replays


@pytest.mark.parametrize("make", [tiny.llama, tiny.sliding, tiny.hybrid])
def test_case_15b_rolled_back_cache_is_as_if_the_block_had_not_been(make: Any) -> None:
    target, ids = make(3), tiny.prompts(1, length=24)[0]
    with torch.no_grad():
        whole = target(input_ids=ids[None], use_cache=False).logits[0]
        cached = CachedTarget(target)
        cached.prefill(ids[:14])
        cached.block(torch.cat((ids[14:17], ids.new_tensor([5, 6, 7, 8]))))
        cached.keep(3)
        logits, _ = cached.block(ids[17:])
    torch.testing.assert_close(logits, whole[17:], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("wanted", [1, 2, 4, 5, 6, 11])
def test_length_is_exact(llama: Any, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tiny.prompts(1)[0]
    expected = plain(llama, ids, max_new_tokens=12).tokens
    oracle(monkeypatch, [*ids.tolist(), *expected], wrong_at=set())
    fast = decode(llama, tiny.drafter(), ids, max_new_tokens=wanted)
    assert fast.tokens == expected[:wanted]
    assert sum(block.produced for block in fast.blocks) == wanted - 1
    assert all(block.drafted <= 4 for block in fast.blocks)


@pytest.mark.parametrize("place", [0, 1, 3, 5, 6, 10])
def test_stops_behind_a_stop_token(llama: Any, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As first token, inside a draft, as last drafted token, as bonus token."""
    ids = next(p for p in tiny.prompts(50) if len(set(plain(llama, p, max_new_tokens=12).tokens)) == 12)
    expected = plain(llama, ids, max_new_tokens=12).tokens
    oracle(monkeypatch, [*ids.tolist(), *expected], wrong_at=set())
    stop = {expected[place]}
    fast = decode(llama, tiny.drafter(), ids, max_new_tokens=12, stop_ids=stop)
    assert fast.tokens == expected[: place + 1] == plain(llama, ids, max_new_tokens=12, stop_ids=stop).tokens
    assert sum(block.produced for block in fast.blocks) == place
    assert all(block.accepted <= block.drafted for block in fast.blocks)


def test_case_39_mask_id_from_the_target_is_kept(llama: Any) -> None:
    """A target may really say the mask token; nothing is trimmed by value."""
    ids = tiny.prompts(1)[0]
    expected = plain(llama, ids, max_new_tokens=20).tokens
    fast = decode(llama, tiny.drafter(mask_token_id=expected[3]), ids, max_new_tokens=20)
    assert fast.tokens == expected


def test_case_21_tau_is_a_mean_over_blocks() -> None:
    """Runs of (3, 1) and (2, 0) accepted tokens: 1.5 drafted tokens a block, not 1.25."""
    blocks = [Block(0, (7, 7, 7), a, a + 1) for a in (3, 1, 2, 0)]
    got = acceptance(blocks, 4)
    assert got.tau is not None
    assert got.tau - 1 == 1.5
    assert got.slots == (3 / 4, 2 / 3, 1 / 2, None)
    assert got.slots_unconditional == (3 / 4, 2 / 4, 1 / 4, None)


def test_short_blocks_count_only_the_slots_they_have() -> None:
    got = acceptance([Block(0, (7, 7, 7), 3, 4), Block(4, (7,), 1, 2)], 3)
    assert got.slots == (1.0, 1.0, 1.0)
    assert got.slots_unconditional == (1.0, 1.0, 1.0)
    assert acceptance([], 2).tau is None


@pytest.mark.parametrize("window", [None, 1, 4, 9, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", [1, 6, 23])
def test_mask_is_that_of_training(window: int | None, causal: bool, position: int) -> None:
    size = 5
    places = torch.arange(30)
    ids = torch.zeros(1, size, dtype=torch.long)
    zero = torch.zeros(1, dtype=torch.long)
    block = Blocks(zero + position, ids, position + torch.arange(size)[None], zero, ids, ids.float())
    full = attention.visible(block, torch.zeros(30, dtype=torch.long), places, window=window, causal=causal)
    mine = block_mask(ids[0], position, window, causal)
    if mine is None:
        assert full[:, :position].all()
        assert full[:, 30:].all()
        return
    kept = mine.shape[1] - size
    assert torch.equal(mine, full[:, [*range(position - kept, position), *range(30, 30 + size)]])
    assert not full[:, : position - kept].any()
    assert not full[:, position:30].any()


def test_context_may_outgrow_its_room() -> None:
    made, model = tiny.drafter(**MIXED), tiny.llama()
    features = torch.randn(20, 2 * tiny.HIDDEN)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    roomy, tight = (Proposer(made, embedding, head, capacity=size) for size in (20, 1))
    with torch.no_grad():
        roomy.append(features)
        for part in features.split(3):
            tight.append(part)
        torch.testing.assert_close(roomy.logits(3, 4), tight.logits(3, 4))


def test_attend_covers_every_layer_of_a_mixed_drafter() -> None:
    made = tiny.spec(**MIXED)
    attend = block_attend(made, torch.zeros(5, dtype=torch.long), 11)
    q, kv = torch.randn(5, 4, 8), torch.randn(5 + 11, 2, 8)
    assert attend(1, q, kv, kv).shape == (5, 4, 8)
    assert attend(0, q, kv[-5 - 5 :], kv[-5 - 5 :]).shape == (5, 4, 8)


def test_checkpoint_generation_settings_do_not_reach_the_reference(llama: Any) -> None:
    """A repetition penalty in the checkpoint would make the reference something else than the arg-max."""
    ids = tiny.prompts(1)[0]
    own = llama.generation_config
    expected = plain(llama, ids, max_new_tokens=20).tokens
    llama.generation_config = type(own)(repetition_penalty=5.0, max_length=3, suppress_tokens=[expected[0]])
    try:
        assert plain(llama, ids, max_new_tokens=20).tokens == expected
        assert llama.generation_config.repetition_penalty == 5.0
    finally:
        llama.generation_config = own


def test_taps_of_another_target_are_refused(llama: Any) -> None:
    with pytest.raises(UserError, match="layers 0 … 3"):
        decode(llama, tiny.drafter(taps=(1, 4)), tiny.prompts(1)[0], max_new_tokens=2)


def test_hooks_are_gone_afterwards(llama: Any) -> None:
    decode(llama, tiny.drafter(), tiny.prompts(1)[0], max_new_tokens=3)
    assert not any(layer._forward_hooks for layer in llama.model.layers)


@pytest.mark.slow
def test_lossless_on_a_real_model(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    made = replace(
        tiny.spec(), hidden_size=576, intermediate_size=512, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
        block_size=8, mask_token_id=17, taps=(1, 14, 27), vocab_size=49152, num_target_layers=30,
    )  # fmt: skip
    drafter = tiny.Drafter(made)
    tiny.initialise(drafter, 0)
    for question in ("Name three colours.", "What is 12 + 30?"):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        ids = torch.tensor(ids)
        assert (
            decode(model, drafter, ids, max_new_tokens=24, stop_ids={2}).tokens
            == plain(model, ids, max_new_tokens=24, stop_ids={2}).tokens
        )
