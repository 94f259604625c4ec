"""The DFlash drafter: Qwen3-style layers whose keys and values come from the target's context and from the block.

Source: arXiv 2602.06036. Parameter names are those of the published checkpoints, so export is a copy.

Legend: T context tokens, M draft tokens (N·B in training, B in decoding), H hidden size, K taps, D head size,
Hq / Hkv query / key-value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftmill.drafter.config import DrafterSpec

KeyValues = tuple[Tensor, Tensor]  # keys [L, Hkv, D] after norm and RoPE, values [L, Hkv, D]
Rotation = tuple[Tensor, Tensor]  # cos, sin, each [L, 1, D]


class Context(NamedTuple):
    """The context before a layer's projections: states C [T, H] and the rotation of its positions."""

    states: Tensor
    by: Rotation


# (layer, queries [M, Hq, D], keys [T + M, Hkv, D], values [T + M, Hkv, D]) → [M, Hq, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Linear(nn.Linear):
    """A linear map whose master weight may be wider than the activations: fp32 masters, bf16 compute."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


def rotation(position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """cos and sin of the plain rotary embedding: position_ids [L] → two [L, 1, D] of `dtype`, computed in fp32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
    angles = position_ids.float()[:, None] * (1.0 / theta**exponent)
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Apply the rotary embedding to x [L, heads, D], halves paired as in Llama and Qwen."""
    cos, sin = by
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Queries from the block; keys and values from context and block by the same projections."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        hidden, d = spec.hidden_size, spec.head_dim
        self.head_dim = d
        self.q_proj = Linear(hidden, spec.num_attention_heads * d, bias=False)
        self.k_proj = Linear(hidden, spec.num_key_value_heads * d, bias=False)
        self.v_proj = Linear(hidden, spec.num_key_value_heads * d, bias=False)
        self.o_proj = Linear(spec.num_attention_heads * d, hidden, bias=False)
        self.q_norm = RMSNorm(d, spec.rms_norm_eps)
        self.k_norm = RMSNorm(d, spec.rms_norm_eps)

    def keys_values(self, x: Tensor, by: Rotation) -> KeyValues:
        """x [L, H] → keys and values [L, Hkv, D]."""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        values = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(keys, by), values

    def forward(self, x: Tensor, by: Rotation, context: KeyValues, attend: Callable[..., Tensor]) -> Tensor:
        queries = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), by)
        own = self.keys_values(x, by)
        keys, values = (torch.cat(pair) for pair in zip(context, own, strict=True))
        out: Tensor = self.o_proj(attend(queries, keys, values).flatten(-2))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, x: Tensor, by: Rotation, context: KeyValues | Context, attend: Callable[..., Tensor]) -> Tensor:
        """context: its keys and values, or what they are made from: then all weights of the layer are used in here."""
        if isinstance(context, Context):
            context = self.self_attn.keys_values(*context)
        x = x + self.self_attn(self.input_layernorm(x), by, context, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Drafter(nn.Module):
    """The trainable part. Embedding and head are the target's and are passed in as plain tensors by the caller."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = Linear(len(spec.taps) * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def context(self, features: Tensor) -> Tensor:
        """C = RMSNorm(W_fc · features): [T, K·H] → [T, H], shared by all layers."""
        out: Tensor = self.hidden_norm(self.fc(features))
        return out

    def context_keys_values(self, context: Tensor, position_ids: Tensor) -> list[KeyValues]:
        """Per layer the keys and values of the context: [T, H] and positions [T] → L × ([T, Hkv, D], [T, Hkv, D]).

        Context rows pass through nothing else, so in decoding these can be computed once and kept.
        """
        by = rotation(position_ids, self.spec.head_dim, self.spec.rope_theta, context.dtype)
        return [layer.self_attn.keys_values(context, by) for layer in self._layers()]

    def forward(self, embeddings: Tensor, position_ids: Tensor, context: list[KeyValues], attend: Attend) -> Tensor:
        """Block embeddings [M, H] at positions [M] over the context's keys and values → final hidden states [M, H]."""
        return self._through(embeddings, position_ids, context, attend)

    def train_forward(
        self, features: Tensor, context_ids: Tensor, embeddings: Tensor, position_ids: Tensor, attend: Attend
    ) -> Tensor:
        """All of it in one: features [T, K·H] at positions [T], block embeddings [M, H] at positions [M] → [M, H].

        The same arithmetic as `context`, `context_keys_values` and `forward` one after another. A single call, so that
        weights which are spread over ranks can be put together layer by layer.
        """
        states = self.context(features)
        context = Context(states, rotation(context_ids, self.spec.head_dim, self.spec.rope_theta, states.dtype))
        return self._through(embeddings, position_ids, [context] * self.spec.layers, attend)

    def _through(
        self, x: Tensor, position_ids: Tensor, context: Sequence[KeyValues | Context], attend: Attend
    ) -> Tensor:
        by = rotation(position_ids, self.spec.head_dim, self.spec.rope_theta, x.dtype)
        for number, layer in enumerate(self._layers()):
            x = layer(x, by, context[number], lambda q, k, v, number=number: attend(number, q, k, v))
        out: Tensor = self.norm(x)
        return out

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]


def initialise(drafter: Drafter, seed: int, std: float = 0.02) -> None:
    """Normal(0, std) for every matrix, ones for norms. The same seed gives the same weights on every device."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            values = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
            parameter.data.copy_(values)
        else:
            parameter.data.fill_(1.0)
