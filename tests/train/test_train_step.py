"""One micro-step adds the gradient of Σ w·CE and nothing else."""

from __future__ import annotations

from dataclasses import replace

import torch
from train_tiny import SETTINGS, gradients, hidden_batch, make_drafter, matrix, same

from draftmill.drafter import attention
from draftmill.drafter.objective import block_hidden
from draftmill.train.step import batch_blocks, micro_step


def step(drafter, batch, settings=SETTINGS):
    return micro_step(drafter, batch, embedding=matrix(), head=matrix(), settings=settings)


def test_the_gradient_is_that_of_a_plain_cross_entropy_over_a_dense_mask() -> None:
    batch, drafter = hidden_batch([3, 0, 5, 2]), make_drafter()
    sums = step(drafter, batch)
    plain = make_drafter().double()
    blocks = attention.trim_padding(batch_blocks(batch, plain, SETTINGS))
    assert len(blocks.anchors) == 10
    attend = attention.dense(plain.spec, blocks, batch.tokens.document_ids, batch.tokens.position_ids)
    hidden = block_hidden(
        plain, batch.features.double(), batch.tokens.position_ids, blocks, matrix().double(), attend
    )  # fmt: skip
    logp = torch.log_softmax(hidden @ matrix().double().T, dim=-1)
    nll = -logp.gather(-1, blocks.labels[..., None])[..., 0]
    loss = (nll * blocks.weights.double()).sum()
    loss.backward()
    torch.testing.assert_close(sums.totals[0], loss.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(sums.totals[1], blocks.weights.double().sum(), rtol=1e-6, atol=0)
    for name, parameter in plain.named_parameters():
        got = drafter.get_parameter(name).grad
        assert torch.allclose(got.double(), parameter.grad, rtol=0, atol=1e-4 * float(parameter.grad.abs().max())), name


def test_gradients_add_up_over_micro_steps() -> None:
    drafter, batch = make_drafter(), hidden_batch([3, 2])
    step(drafter, batch)
    once = gradients(drafter)
    step(drafter, batch)
    assert same(gradients(drafter), {name: 2 * gradient for name, gradient in once.items()})


def test_case_24_a_batch_without_valid_anchor_adds_nothing() -> None:
    drafter = make_drafter()
    sums = step(drafter, hidden_batch([0, 0]))
    assert not gradients(drafter)
    assert not sums.totals.any()
    assert not sums.slots.any()
    step(drafter, hidden_batch([3, 2]))
    before = gradients(drafter)
    step(drafter, hidden_batch([0]))
    assert same(before, gradients(drafter))


def test_anchors_depend_on_seed_epoch_and_bin_and_on_nothing_else() -> None:
    few = replace(SETTINGS, anchors=3)
    batch, drafter = hidden_batch([9, 9], index=4), make_drafter()
    again = replace(batch, tokens=replace(batch.tokens, index=77))  # the same bin elsewhere in the order
    later = replace(batch, tokens=replace(batch.tokens, epoch=1))
    other = replace(batch, tokens=replace(batch.tokens, bin=5))
    anchors = batch_blocks(batch, drafter, few).anchors
    assert len(anchors) == 3
    torch.manual_seed(123)
    assert torch.equal(batch_blocks(again, drafter, few).anchors, anchors)
    changed = [batch_blocks(later, drafter, few), batch_blocks(other, drafter, few)]
    changed.append(batch_blocks(batch, drafter, replace(few, seed=1)))
    assert all(not torch.equal(blocks.anchors, anchors) for blocks in changed)


def test_states_in_another_dtype_are_computed_in_the_drafters() -> None:
    drafter, batch = make_drafter(), hidden_batch([3, 2])
    rough = replace(batch, features=batch.features.bfloat16())
    step(drafter, rough)
    got = gradients(drafter)
    drafter.zero_grad()
    step(drafter, replace(batch, features=batch.features.bfloat16().float()))
    assert same(got, gradients(drafter))


def test_the_head_gets_no_gradient() -> None:
    drafter, head = make_drafter(), matrix(1).requires_grad_()
    micro_step(drafter, hidden_batch([3]), embedding=matrix(), head=head, settings=SETTINGS)
    assert len(gradients(drafter)) == len(list(drafter.parameters()))
    assert head.grad is None
