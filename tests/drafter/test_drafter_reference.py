"""The fast path against the slow, obvious one in float64: outputs, loss, gradients, metrics, on fresh inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from drafter_reference import Inputs, block_outputs, loss_and_metrics

from draftmill.drafter.anchors import draw_anchors, valid_anchors
from draftmill.drafter.attention import by_document, dense, trim_padding
from draftmill.drafter.blocks import make_blocks
from draftmill.drafter.config import DrafterSpec
from draftmill.drafter.metrics import summarise
from draftmill.drafter.model import Drafter, initialise
from draftmill.drafter.objective import block_hidden, block_loss

FULL, SLIDING = "full_attention", "sliding_attention"
BASE = DrafterSpec(
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    block_size=5,
    mask_token_id=36,
    taps=(1, 3, 4),
    layer_types=(FULL, FULL),
    layer_causal=(False, False),
    sliding_window=None,
    vocab_size=37,
    num_target_layers=6,
    max_position_embeddings=128,
)
SPECS = {
    "full": BASE,
    "causal": replace(BASE, layer_causal=(True, True)),
    "sliding and full": replace(BASE, layer_types=(SLIDING, FULL), layer_causal=(True, False), sliding_window=7),
    "sliding, seeing ahead": replace(BASE, layer_types=(SLIDING, SLIDING), sliding_window=3),
}


def random_inputs(spec: DrafterSpec, seed: int) -> Inputs:
    """Packed documents of odd lengths with two assistant turns in some, and padding at the end."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 17, (4,), generator=g).tolist()
    total = sum(lengths) + 3
    document_ids = torch.full((total,), -1)
    position_ids = torch.zeros(total, dtype=torch.long)
    start = 0
    for number, length in enumerate(lengths):
        document_ids[start : start + length] = number
        position_ids[start : start + length] = torch.arange(length)
        start += length
    loss_mask = (torch.rand(total, generator=g) < 0.8) & (document_ids >= 0)
    data = Inputs(
        features=torch.randn(total, len(spec.taps) * spec.hidden_size, generator=g, dtype=torch.float64),
        input_ids=torch.randint(0, spec.vocab_size - 1, (total,), generator=g),
        loss_mask=loss_mask,
        position_ids=position_ids,
        document_ids=document_ids,
        anchors=[],
        embedding=torch.randn(spec.vocab_size, spec.hidden_size, generator=g, dtype=torch.float64),
        head=torch.randn(spec.vocab_size, spec.hidden_size, generator=g, dtype=torch.float64),
    )
    anchors = draw_anchors(valid_anchors(loss_mask, document_ids), 9, seed=seed, epoch=0, index=0)
    data.anchors = [int(a) for a in anchors if a >= 0]
    return data


def setting(spec: DrafterSpec, seed: int):
    drafter = Drafter(spec)
    initialise(drafter, seed, std=0.3)
    for parameter in drafter.parameters():  # norms too, so that a forgotten one shows
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5)
    drafter = drafter.double()
    data = random_inputs(spec, seed)
    anchors = torch.tensor([*data.anchors, -1, -1])
    blocks = make_blocks(
        data.input_ids, data.loss_mask, data.position_ids, data.document_ids, anchors,
        block_size=spec.block_size, mask_token_id=spec.mask_token_id, gamma=4.0,
    )  # fmt: skip
    return drafter, data, blocks


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_hidden_states_equal_the_reference(name: str, seed: int) -> None:
    spec = SPECS[name]
    drafter, data, blocks = setting(spec, seed)
    weights = drafter.state_dict()
    expected = torch.stack([block_outputs(weights, spec, data, a) for a in data.anchors])
    for attend in (dense, by_document):
        used = trim_padding(blocks) if attend is by_document else blocks
        how = attend(spec, used, data.document_ids, data.position_ids)
        got = block_hidden(drafter, data.features, data.position_ids, used, data.embedding, how)
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got[: len(expected)], expected, rtol=2e-5, atol=2e-5)  # rope and norms are fp32


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_loss_gradients_and_metrics_equal_the_reference(name: str, chunk_rows: int) -> None:
    spec = SPECS[name]
    drafter, data, blocks = setting(spec, 5)
    weights = {k: v.clone().requires_grad_() for k, v in drafter.state_dict().items()}
    expected = loss_and_metrics(weights, spec, data, gamma=4.0)
    gradients = torch.autograd.grad(expected["loss"], list(weights.values()))
    loss, sums = block_loss(
        drafter, data.features, data.position_ids, blocks,
        embedding=data.embedding, head=data.head, chunk_rows=chunk_rows,
        attend=dense(spec, blocks, data.document_ids, data.position_ids),
    )  # fmt: skip
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected["loss"].detach()), rel=1e-5)
    for (key, parameter), gradient in zip(drafter.named_parameters(), gradients, strict=True):
        assert parameter.grad is not None, key
        gap = (parameter.grad - gradient).norm() / gradient.norm()
        assert gap < 1e-5, f"{key}: {gap}"
    assert float(sums.totals[1]) == pytest.approx(float(expected["weight"]), rel=1e-6)
    assert float(sums.totals[2]) == float(expected["leading"].sum())
    assert float(sums.totals[3]) == len(data.anchors)
    assert sums.slots[4].tolist() == expected["hits"].tolist()
    assert summarise(sums)["tau_teacher_forced"] == pytest.approx(float(expected["leading"].double().mean()))


def test_bf16_compute_stays_near_float64_with_fp32_masters() -> None:
    drafter, data, blocks = setting(BASE, 3)
    exact, _ = block_loss(
        drafter, data.features, data.position_ids, blocks, embedding=data.embedding, head=data.head,
        attend=dense(BASE, blocks, data.document_ids, data.position_ids), chunk_rows=16,
    )  # fmt: skip
    exact.backward()
    reference = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    drafter = drafter.float()
    half = torch.bfloat16
    loss, _ = block_loss(
        drafter, data.features.to(half), data.position_ids, blocks, embedding=data.embedding.to(half),
        head=data.head.to(half), attend=dense(BASE, blocks, data.document_ids, data.position_ids), chunk_rows=16,
    )  # fmt: skip
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=0.02)
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        gap = (parameter.grad.double() - reference[name]).norm() / reference[name].norm()
        assert gap < 0.1, f"{name}: {gap}"
