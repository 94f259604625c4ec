"""Captured states are the target's own: right layer, right document, right norm."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from target_models import (
    HIDDEN,
    batch_of,
    build,
    captured,
    documents,
    gap,
    load,
    plain_features,
    plain_model,
    plain_states,
    save,
)
from torch import nn
from transformers import PhiConfig, PhiForCausalLM

from draftmill.errors import UserError
from draftmill.target.capture import Target
from draftmill.target.model import shared_matrices

REAL_VOCAB = 49152


def test_case_10_taps_are_bit_equal_to_the_models_own_hidden_states(real: Target, real_plain: nn.Module) -> None:
    (text,) = documents([61], vocab=REAL_VOCAB)
    features = captured(real, batch_of([text], 80))
    with torch.no_grad():
        states = real_plain(text[None].long(), output_hidden_states=True, use_cache=False).hidden_states
    columns = features[:61].split(real.hidden_size, dim=1)
    assert real.taps == (1, 14, 28)
    assert len(columns) == 3
    for tap, column in zip(real.taps, columns, strict=True):
        assert torch.equal(column, states[tap + 1][0])
        for neighbour in (tap, tap + 2):
            assert not torch.equal(column, states[neighbour][0])
    assert torch.equal(columns[1], plain_states(real_plain, text, (14,))[0])
    assert not features[61:].any()
    assert torch.equal(real.features(text), features[:61])


@pytest.mark.parametrize("taps", [(0,), (3,), (0, 1, 2, 3)])
def test_case_10_first_last_and_all_layers_can_be_tapped(folders: dict[str, Path], taps: tuple[int, ...]) -> None:
    texts = documents([9])
    model = plain_model(folders["qwen3"])
    assert torch.equal(captured(load(folders["qwen3"], taps), batch_of(texts)), plain_features(model, texts, taps))


def test_case_11_final_hidden_times_head_has_the_models_own_argmax(real: Target, real_plain: nn.Module) -> None:
    (text,) = documents([70], vocab=REAL_VOCAB, seed=1)
    final = torch.full((75, real.hidden_size), torch.nan, dtype=torch.bfloat16)
    real.capture_final(batch_of([text], 75), final)
    with torch.no_grad():
        logits = real_plain(text[None].long(), use_cache=False).logits[0]
    assert torch.equal(final[:70] @ real.head.T, logits)
    assert torch.equal((final[:70] @ real.head.T).argmax(-1), logits.argmax(-1))
    assert not final[70:].any()
    (before_norm,) = plain_states(real_plain, text, (29,))
    assert not torch.equal((before_norm @ real.head.T).argmax(-1), logits.argmax(-1)), "the norm must matter here"


@pytest.mark.parametrize("name", ["llama", "gemma3", "hybrid"])
def test_case_11_of_several_documents(folders: dict[str, Path], name: str) -> None:
    texts = documents([13, 1, 20], seed=2)
    target, model = load(folders[name]), plain_model(folders[name])
    batch = batch_of(texts, 40)
    final = torch.full((40, HIDDEN), torch.nan)
    target.capture_final(batch, final)
    with torch.no_grad():
        logits = torch.cat([model(text[None].long(), use_cache=False).logits[0] for text in texts])
    assert gap(final[:34] @ target.head.T, logits) < 1e-5
    assert torch.equal((final[:34] @ target.head.T).argmax(-1), logits.argmax(-1))
    assert gap(captured(target, batch)[:34], plain_features(model, texts, (0, 2))) < 1e-5, "capture must work after it"


@pytest.mark.parametrize("isolation", ["packed", "rows"])
def test_case_12_each_document_gets_its_own_states_and_again_the_same(folders: dict[str, Path], isolation: str) -> None:
    texts = documents([5, 11, 5, 1, 8], seed=3)
    target = load(folders["llama"], isolation=isolation)
    assert target.isolation == isolation
    batch = batch_of(texts, 36)
    features = captured(target, batch)
    model = plain_model(folders["llama"])
    for (start, end), text in zip(batch.spans(), texts, strict=True):
        assert gap(features[start:end], plain_features(model, [text], (0, 2))) < 1e-5
    assert gap(features[0:5], features[16:21]) > 0.1, "documents of the same length must not be mistaken for each other"
    assert not features[30:].any()
    captured(target, batch_of(documents([17, 3], seed=4)))
    assert torch.equal(captured(target, batch), features)


def test_case_12_a_repeated_call_of_the_real_target_is_bit_identical(real: Target) -> None:
    batch = batch_of(documents([23, 40, 1], vocab=REAL_VOCAB, seed=5), 70)
    assert torch.equal(captured(real, batch), captured(real, batch))


@pytest.mark.parametrize("isolation", ["packed", "rows"])
@pytest.mark.parametrize(
    ("value", "words", "taps"),
    [
        (torch.nan, "not finite", (0, 2)),
        (-torch.inf, "not finite", (0, 2)),
        (0.0, "zero in every component", (0, 2)),
        (0.0, "zero in every component", (0, 2, 3)),
        (torch.nan, "not finite", (0, 2, 3)),  # 0 · NaN in later attention spoils earlier tokens of layer 3
    ],
)
def test_case_15_bad_states_are_refused_by_document_token_and_layer(
    folders: dict[str, Path], isolation: str, value: float, words: str, taps: tuple[int, ...]
) -> None:
    texts = documents([7, 9, 4], seed=6)
    target = load(folders["llama"], taps, isolation=isolation)
    marked = 95
    texts = [torch.where(text == marked, 5, text) for text in texts]
    texts[1][3] = marked
    batch = batch_of(texts, 24, index=7)
    ids: list[torch.Tensor] = []

    def see(_module: nn.Module, args: tuple[torch.Tensor]) -> None:
        ids.append(args[0])

    def plant(_module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
        return torch.where((ids[-1] == marked)[..., None], value, output)

    with target.whole() as model:
        model.get_input_embeddings().register_forward_pre_hook(see)
        handle = model.get_decoder().layers[2].register_forward_hook(plant, prepend=True)
    with pytest.raises(ArithmeticError) as caught:
        captured(target, batch)
    message = str(caught.value)
    assert f"target layer 2 is {words}" in message
    assert "batch 7" in message
    assert "document 101 of" in message
    assert "token 3 of it" in message
    handle.remove()
    assert torch.isfinite(captured(target, batch)).all()


def test_case_15_a_broken_weight_names_the_first_tap_behind_it(tmp_path: Path) -> None:
    model = build("llama")
    model.get_decoder().layers[2].mlp.down_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ArithmeticError, match=r"layer 3 is not finite.*document 100 .*token 0 .*\(6 of 6 tokens"):
        captured(load(tmp_path, (1, 3), isolation="rows"), batch_of(documents([6])))
    assert torch.isfinite(captured(load(tmp_path, (0, 1)), batch_of(documents([6])))).all()


def test_one_component_of_zero_is_no_fault(folders: dict[str, Path]) -> None:
    target = load(folders["llama"], (1,))
    with target.whole() as model:
        layer = model.get_decoder().layers[1]
    layer.register_forward_hook(lambda _m, _a, out: torch.cat((out[..., :1] * 0, out[..., 1:]), -1), prepend=True)
    features = captured(target, batch_of(documents([6])))
    assert not features[:, 0].any()
    assert features[:, 1:].all()


def test_whole_gives_the_models_own_logits_and_capture_still_works_after_it(
    real: Target, real_plain: nn.Module
) -> None:
    batch = batch_of(documents([30, 12], vocab=REAL_VOCAB, seed=7))
    ids = batch.input_ids[None, :30].long()
    before = captured(real, batch)
    with real.whole() as model, torch.no_grad():
        out = model(ids, use_cache=True)
        again = model(ids[:, -1:], past_key_values=out.past_key_values).logits
        inside = real.features(batch.input_ids[:30])
    with torch.no_grad():
        wanted = real_plain(ids, use_cache=True)
        wanted_again = real_plain(ids[:, -1:], past_key_values=wanted.past_key_values).logits
    assert torch.equal(out.logits, wanted.logits)
    assert torch.equal(again, wanted_again)
    assert real.isolation == "packed", "decoding in between must not leave the slower layout behind"
    assert torch.equal(inside, real.features(batch.input_ids[:30]))
    assert torch.equal(captured(real, batch), before)


def test_capture_survives_an_error_inside_whole(folders: dict[str, Path]) -> None:
    target = load(folders["llama"])
    batch = batch_of(documents([4, 9]))
    before = captured(target, batch)
    with pytest.raises(ZeroDivisionError), target.whole():
        raise ZeroDivisionError
    assert torch.equal(captured(target, batch), before)


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_nothing_behind_the_last_tap_runs_in_capture(folders: dict[str, Path], name: str) -> None:
    target = load(folders[name], (0, 2))
    calls: Counter[str] = Counter()
    with target.whole() as model:
        named = {f"layer {i}": layer for i, layer in enumerate(model.get_decoder().layers)}
        named |= {"norm": model.get_decoder().norm, "head": model.get_output_embeddings()}
    for key, module in named.items():
        module.register_forward_hook(lambda *_, key=key: calls.update([key]))
    batch = batch_of(documents([6, 6]))  # of one length, so that rows make one group
    captured(target, batch)
    assert calls == {"layer 0": 1, "layer 1": 1, "layer 2": 1}
    calls.clear()
    target.capture_final(batch, torch.empty(12, HIDDEN))
    assert calls == {f"layer {i}": 1 for i in range(4)} | {"norm": 1}


@pytest.mark.parametrize("taps", [(1, 4), (-1, 2), (30,)])
def test_taps_out_of_range_are_the_users_error(folders: dict[str, Path], taps: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"drafter\.taps: .* layers are 0 … 3"):
        load(folders["llama"], taps)


def test_a_head_with_bias_is_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    PhiForCausalLM(PhiConfig(**sizes, num_hidden_layers=2)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="lm_head has a bias"):
        load(tmp_path, (0,))


def test_shared_matrices_are_those_of_the_model(folders: dict[str, Path]) -> None:
    untied, tied = build("llama"), build("tied")
    embedding, head = shared_matrices(untied)
    assert torch.equal(embedding, untied.model.embed_tokens.weight)
    assert torch.equal(head, untied.lm_head.weight)
    assert not torch.equal(embedding, head)
    embedding, head = shared_matrices(tied)
    assert embedding.data_ptr() == head.data_ptr()
    target = load(folders["tied"])
    assert target.embedding.data_ptr() == target.head.data_ptr()
    assert torch.equal(target.embedding, tied.model.embed_tokens.weight)


def test_the_fingerprint_names_the_weights_and_their_dtype(folders: dict[str, Path], tmp_path: Path) -> None:
    first = load(folders["llama"]).fingerprint
    shutil.copytree(folders["llama"], tmp_path / "copy")
    assert len(first) == 16
    assert load(folders["llama"], (1,), isolation="rows").fingerprint == first
    assert load(tmp_path / "copy").fingerprint == first
    others = {
        "dtype": load(folders["llama"], dtype="bfloat16").fingerprint,
        "seed": load(save(tmp_path / "seed", "llama", seed=1)).fingerprint,
        "config": load(save(tmp_path / "theta", "llama", rope_theta=5e4)).fingerprint,
    }
    for name in ("model.layers.3.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"):  # behind the taps, too
        model = build("llama")
        model.get_parameter(name).mul_(1.01)
        model.save_pretrained(tmp_path / "changed")
        others[name] = load(tmp_path / "changed").fingerprint
    assert first not in others.values()
    assert len(set(others.values())) == len(others)


def test_the_target_is_frozen(folders: dict[str, Path]) -> None:
    target = load(folders["llama"])
    with target.whole() as model:
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not captured(target, batch_of(documents([5]))).requires_grad
    assert (target.features_width, target.dtype) == (2 * HIDDEN, torch.float32)
