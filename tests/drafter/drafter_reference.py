"""The method once more, as slow and obvious as it can be written: one block at a time, one slot at a time, in float64.

Independent of the package's attention, masks, loss and metrics; it shares only the parameter names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from draftmill.drafter.config import DrafterSpec


@dataclass
class Inputs:
    features: Tensor  # [T, K·H]
    input_ids: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    document_ids: Tensor
    anchors: list[int]
    embedding: Tensor
    head: Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, position: int, theta: float) -> Tensor:
    """x [heads, D] at one position, pair (i, i + D/2) turned by position / theta^(2i/D)."""
    d = x.shape[-1]
    out = x.clone()
    for i in range(d // 2):
        angle = position / theta ** (2 * i / d)
        a, b = x[:, i], x[:, i + d // 2]
        out[:, i] = a * math.cos(angle) - b * math.sin(angle)
        out[:, i + d // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def block_outputs(weights: dict[str, Tensor], spec: DrafterSpec, data: Inputs, anchor: int) -> Tensor:
    """Final hidden states [B, H] of the block at `anchor`."""
    eps = spec.rms_norm_eps
    context = norm(data.features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    start = int(data.position_ids[anchor])
    ids = [int(data.input_ids[anchor])] + [spec.mask_token_id] * (spec.block_size - 1)
    x = torch.stack([data.embedding[i] for i in ids])
    for layer in range(spec.layers):
        x = _layer(weights, spec, data, context, x, layer, anchor, start)
    return norm(x, weights["norm.weight"], eps)


def _layer(weights, spec, data, context, x, layer, anchor, start):
    prefix, eps = f"layers.{layer}.", spec.rms_norm_eps
    w = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    h = norm(x, w["input_layernorm.weight"], eps)
    attended = torch.stack([_attend(w, spec, data, context, h, layer, anchor, start, slot) for slot in range(len(h))])
    x = x + attended @ w["self_attn.o_proj.weight"].T
    h = norm(x, w["post_attention_layernorm.weight"], eps)
    gate = h @ w["mlp.gate_proj.weight"].T
    return x + (gate * torch.sigmoid(gate) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


def _attend(w, spec, data, context, h, layer, anchor, start, slot):
    d, eps, window = spec.head_dim, spec.rms_norm_eps, spec.window(layer)
    place = start + slot
    seen = []  # (source row, position)
    for c in range(anchor):
        same = int(data.document_ids[c]) == int(data.document_ids[anchor])
        if same and (window is None or place - int(data.position_ids[c]) < window):
            seen.append((context[c], int(data.position_ids[c])))
    for other in range(len(h)):
        causal_ok = other <= slot or not spec.layer_causal[layer]
        if causal_ok and (window is None or abs(other - slot) < window):
            seen.append((h[other], start + other))
    q = norm((h[slot] @ w["self_attn.q_proj.weight"].T).view(-1, d), w["self_attn.q_norm.weight"], eps)
    q = rope(q, place, spec.rope_theta)
    keys = [
        rope(
            norm((x @ w["self_attn.k_proj.weight"].T).view(-1, d), w["self_attn.k_norm.weight"], eps),
            p,
            spec.rope_theta,
        )
        for x, p in seen
    ]
    values = [(x @ w["self_attn.v_proj.weight"].T).view(-1, d) for x, _ in seen]
    group = spec.num_attention_heads // spec.num_key_value_heads
    out = []
    for head in range(spec.num_attention_heads):
        k = torch.stack([key[head // group] for key in keys])
        v = torch.stack([value[head // group] for value in values])
        scores = torch.softmax(k @ q[head] / math.sqrt(d), dim=0)
        out.append(scores @ v)
    return torch.cat(out)


def loss_and_metrics(weights: dict[str, Tensor], spec: DrafterSpec, data: Inputs, gamma: float) -> dict[str, Tensor]:
    """Σ w·CE, Σ w, accepted slots + 1 per block, top-1 hits per slot."""
    loss, weight, leading = torch.zeros((), dtype=torch.float64), 0.0, []
    hits = torch.zeros(spec.block_size)
    for anchor in data.anchors:
        hidden = block_outputs(weights, spec, data, anchor)
        right, alive, run = True, True, 1
        for slot in range(1, spec.block_size):
            p = anchor + slot
            inside = p < len(data.input_ids) and int(data.document_ids[p]) == int(data.document_ids[anchor])
            alive = alive and inside and bool(data.loss_mask[p])
            if not alive:
                break
            logits = data.head @ hidden[slot]
            label, w = int(data.input_ids[p]), math.exp(-(slot - 1) / gamma)
            loss = loss + w * (torch.logsumexp(logits, 0) - logits[label])
            weight += w
            hit = int(logits.argmax()) == label
            hits[slot] += hit
            right = right and hit
            run += right
        leading.append(run)
    return {"loss": loss, "weight": torch.tensor(weight), "leading": torch.tensor(leading), "hits": hits}
