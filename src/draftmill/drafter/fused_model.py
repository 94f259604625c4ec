"""The drafter's forward and backward pass for a GPU: few launches, few bytes, fixed shapes.

The same arithmetic as `model.Drafter.train_forward`, in two passes. The context pass makes every layer's keys and
values of the context. The block pass then takes the draft blocks through the layers; blocks never see each other, so
they may go in several groups, one after another, each with its own backward pass: memory follows the group, not N.

Legend: T context tokens, M draft tokens of a group, H hidden size, F intermediate size, D head size, Hq / Hkv heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftmill.drafter.kernels.attention import Ranges, block_attention
from draftmill.drafter.kernels.norm import add_rms_norm, rms_norm, rms_norm_backward, rms_norm_forward
from draftmill.drafter.kernels.rotary import norm_rotate_backward, norm_rotate_forward
from draftmill.drafter.kernels.swiglu import swiglu_backward, swiglu_forward
from draftmill.drafter.model import Drafter, Layer
from draftmill.drafter.weights import AnyWeight, ComputeWeights, LayerWeights

Rotation = tuple[Tensor, Tensor]  # cos, sin, each [R, D/2] fp32


def half_rotation(position_ids: Tensor, head_dim: int, theta: float) -> Rotation:
    """cos and sin of `model.rotation`, whose halves are equal: [R] int → two [R, D/2] fp32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
    angles = position_ids.float()[:, None] * (1.0 / theta**exponent)
    return angles.cos(), angles.sin()


class ContextPass:
    """Keys and values of the context in every layer, and the way back once all blocks have gone through.

    keys, values: per layer [T, Hkv, D], leaves whose `.grad` collects what the blocks send back.
    """

    def __init__(self, drafter: Drafter, weights: ComputeWeights, features: Tensor, position_ids: Tensor) -> None:
        """features [T, K·H] in the compute dtype, position_ids [T]."""
        spec = drafter.spec
        self._drafter, self._weights, self._features = drafter, weights, features
        self._by = half_rotation(position_ids, spec.head_dim, spec.rope_theta)
        self._projected = weights.fc.product(features)
        norm = drafter.hidden_norm
        self._states, self._rstd = rms_norm_forward(self._projected, norm.weight, norm.eps)
        self._before = [self._part(layer).product(self._states) for layer in weights.layers]
        self.keys, self.values = [], []
        for layer, both in zip(weights.layers, self._before, strict=True):
            key, value = self._heads(both)
            norm = layer.layer.self_attn.k_norm
            self.keys.append(norm_rotate_forward(key, norm.weight, norm.eps, *self._by).requires_grad_())
            self.values.append(value.detach().requires_grad_())

    def backward(self) -> None:
        """Add the gradients of all that the context went through to the weights' own."""
        states_gradient = torch.zeros_like(self._states)
        for number, layer in enumerate(self._weights.layers):
            before, gradient = self._before[number], torch.empty_like(self._before[number])
            key_gradient, value_gradient = self._heads(gradient)
            norm = layer.layer.self_attn.k_norm
            _, weight_gradient = norm_rotate_backward(
                given(self.keys[number]), self._heads(before)[0], norm.weight, norm.eps, *self._by, out=key_gradient
            )
            add_to(norm.weight, weight_gradient)
            value_gradient.copy_(given(self.values[number]))
            part = self._part(layer)
            part.add_gradient(gradient, self._states)
            part.add_input_gradient(gradient, into=states_gradient)
        norm = self._drafter.hidden_norm
        gradient, weight_gradient = rms_norm_backward(states_gradient, self._projected, norm.weight, self._rstd)
        add_to(norm.weight, weight_gradient)
        self._weights.fc.add_gradient(gradient, self._features)

    def _part(self, layer: LayerWeights) -> AnyWeight:
        """The rows of q, k, v that make keys and values."""
        spec = self._drafter.spec
        return layer.qkv.outputs(spec.num_attention_heads * spec.head_dim)

    def _heads(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """[T, 2·Hkv·D] → keys, values [T, Hkv, D], as views."""
        spec = self._drafter.spec
        key, value = both.unflatten(-1, (2, spec.num_key_value_heads, spec.head_dim)).unbind(1)
        return key, value


def block_pass(
    drafter: Drafter,
    weights: ComputeWeights,
    context: ContextPass,
    embeddings: Tensor,
    position_ids: Tensor,
    ranges: list[Ranges],
) -> Tensor:
    """embeddings [n + 1, H] of the blocks' first tokens and of MASK, positions [M = n·B] of all draft tokens, who sees
    whom in each layer → final hidden states [n·(B − 1), H] of all but each block's first token, whose own is not asked
    for: behind the last layer's attention there are no rows for it.

    Its backward pass adds to the weights' gradients and to those of the context's keys and values. Most draft tokens
    are MASK, so the first layer's norm and projections, which do not know positions yet, meet each distinct row once.
    """
    spec = drafter.spec
    by = half_rotation(position_ids, spec.head_dim, spec.rope_theta)
    layers = [layer.layer for layer in weights.layers]
    normed = rms_norm(embeddings, layers[0].input_layernorm.weight, layers[0].input_layernorm.eps)
    x = spread(embeddings, spec.block_size)
    for number, own in enumerate(weights.layers):
        attention = layers[number].self_attn
        queries, keys, values = _QueriesKeysValues.apply(  # type: ignore[no-untyped-call]
            normed, attention.q_norm.weight, attention.k_norm.weight, own, by, None if number else spec.block_size
        )
        seen = block_attention(queries, context.keys[number], context.values[number], keys, values, ranges[number])
        seen = seen.flatten(1)
        if number + 1 == len(layers):
            seen, x = without_first(seen, spec.block_size), without_first(x, spec.block_size)
        delta = _Product.apply(seen, own.out)  # type: ignore[no-untyped-call]
        norm = layers[number].post_attention_layernorm
        x, normed = add_rms_norm(x, delta, norm.weight, norm.eps)
        delta = _MLP.apply(normed, own)  # type: ignore[no-untyped-call]
        norm = layers[number + 1].input_layernorm if number + 1 < len(layers) else drafter.norm
        x, normed = add_rms_norm(x, delta, norm.weight, norm.eps)
    return normed


def spread(rows: Tensor, block_size: int) -> Tensor:
    """[n + 1, …], the first of each block and the one of all others → [n·B, …]."""
    first, other = rows[:-1, None], rows[-1].expand(rows.shape[0] - 1, block_size - 1, *rows.shape[1:])
    return torch.cat((first, other), dim=1).flatten(0, 1)


def without_first(rows: Tensor, block_size: int) -> Tensor:
    """[n·B, …] → [n·(B − 1), …], without the first of each block."""
    kept: Tensor = rows.unflatten(0, (-1, block_size))[:, 1:]
    return kept.flatten(0, 1)


class _Product(torch.autograd.Function):
    """rows · weightᵀ; the weight's gradient goes straight to where it is collected."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: AnyWeight) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight = weight
        return weight.product(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        ctx.weight.add_gradient(gradient, rows)
        return ctx.weight.input_gradient(gradient), None


class _QueriesKeysValues(torch.autograd.Function):
    """rows [M, H] → queries [M, Hq, D], keys and values [M, Hkv, D]: one product, norms, rotation.

    block_size: rows are [n + 1, H], to be spread after the product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        own: LayerWeights,
        by: Rotation,
        block_size: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = own.qkv.product(rows).unflatten(-1, (-1, q_norm.shape[0]))
        ctx.block_size = block_size
        if block_size is not None:
            heads = spread(heads, block_size)
        query, key, value = _split(heads, own)
        attention = own.layer.self_attn
        ctx.own, ctx.by = own, by
        ctx.save_for_backward(rows, heads, q_norm, k_norm)
        queries = norm_rotate_forward(query, q_norm, attention.q_norm.eps, *by)
        keys = norm_rotate_forward(key, k_norm, attention.k_norm.eps, *by)
        return queries, keys, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        rows, heads, q_norm, k_norm = ctx.saved_tensors
        own, attention = ctx.own, ctx.own.layer.self_attn
        query, key, _ = _split(heads, own)
        gradient = torch.empty_like(heads)
        to_query, to_key, to_value = _split(gradient, own)
        cos, sin = ctx.by
        _, dq = norm_rotate_backward(gradients[0], query, q_norm, attention.q_norm.eps, cos, sin, out=to_query)
        _, dk = norm_rotate_backward(gradients[1], key, k_norm, attention.k_norm.eps, cos, sin, out=to_key)
        to_value.copy_(gradients[2])
        flat = gradient.flatten(1)
        if ctx.block_size is not None:
            flat = _gathered(flat, ctx.block_size)
        own.qkv.add_gradient(flat, rows)
        return own.qkv.input_gradient(flat), dq.to(q_norm.dtype), dk.to(k_norm.dtype), None, None, None


def _gathered(gradient: Tensor, block_size: int) -> Tensor:
    """Of what `spread` made, back to [n + 1, …]: the one row of all others gets the sum, added up in fp32."""
    blocks = gradient.unflatten(0, (-1, block_size))
    other = blocks[:, 1:].sum((0, 1), dtype=torch.float32).to(gradient.dtype)
    return torch.cat((blocks[:, 0], other[None]))


class _MLP(torch.autograd.Function):
    """SwiGLU. Keeps the gate and up projections; their product is made again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, own: LayerWeights) -> Tensor:
        gate_up = own.gate_up.product(rows)
        ctx.own = own
        ctx.save_for_backward(rows, gate_up)
        return own.down.product(swiglu_forward(gate_up))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        rows, gate_up = ctx.saved_tensors
        own = ctx.own
        inner = own.down.input_gradient(gradient)
        to_gate_up, product = swiglu_backward(gate_up, inner, grad_in_place=True, out=inner)
        own.down.add_gradient(gradient, product)
        own.gate_up.add_gradient(to_gate_up, rows)
        return own.gate_up.input_gradient(to_gate_up), None


def _split(heads: Tensor, own: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
    """[M, Hq + 2·Hkv, D] → queries, keys, values, as views."""
    layer: Layer = own.layer
    key_heads = layer.self_attn.k_proj.weight.shape[0] // heads.shape[-1]
    query, key, value = heads.split([heads.shape[1] - 2 * key_heads, key_heads, key_heads], dim=1)
    return query, key, value


def given(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, "no block has sent a gradient back"
    return leaf.grad


def add_to(parameter: Tensor, gradient: Tensor) -> None:
    assert parameter.grad is not None, "ComputeWeights gives every parameter a gradient"
    parameter.grad.add_(gradient)
