"""Small random targets and drafters in float32, built in a moment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from draftmill.drafter import attention
from draftmill.drafter.anchors import draw_anchors, valid_anchors
from draftmill.drafter.blocks import make_blocks
from draftmill.drafter.config import FULL, DrafterSpec
from draftmill.drafter.model import Drafter, initialise
from draftmill.drafter.objective import block_loss
from draftmill.evaluate.agreement import plain_features
from draftmill.evaluate.plain import plain
from draftmill.target.model import shared_matrices

VOCAB, HIDDEN, LAYERS, MASK = 97, 32, 4, 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def llama(seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | changes))).eval().requires_grad_(False)


def sliding(seed: int = 0, window: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).eval().requires_grad_(False)


def hybrid(seed: int = 0) -> nn.Module:
    """Three gated delta net layers and one of full attention, as in Qwen3.5."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        **SIZES,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    return Qwen3_5ForCausalLM(config).eval().requires_grad_(False)


def spec(**changes: Any) -> DrafterSpec:
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "block_size": 5,
        "mask_token_id": MASK,
        "taps": (1, 3),
        "layer_types": (FULL, FULL),
        "layer_causal": (False, False),
        "sliding_window": None,
        "vocab_size": VOCAB,
        "num_target_layers": LAYERS,
        "max_position_embeddings": 512,
    }
    return DrafterSpec(**(values | changes))


def drafter(seed: int = 0, std: float = 0.3, **changes: Any) -> Drafter:
    made = Drafter(spec(**changes))
    initialise(made, seed, std)
    return made.eval()


def prompts(count: int, length: int = 13, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB - 1, (length,), generator=generator) for _ in range(count)]


def trained(model: nn.Module, inputs: list[Tensor], *, new_tokens: int, steps: int = 150, **changes: Any) -> Drafter:
    """A drafter that has learnt the target's own answers to these very prompts by heart."""
    made = drafter(std=0.1, **changes)
    embedding, head = shared_matrices(model)
    rows = []
    for ids in inputs:
        whole = torch.cat((ids, ids.new_tensor(plain(model, ids, max_new_tokens=new_tokens).tokens)))
        with torch.no_grad():
            rows.append((whole, len(ids), plain_features(model, whole, made.spec.taps)))
    optimizer = torch.optim.AdamW(made.train().parameters(), lr=5e-3)
    for step in range(steps):
        whole, prompt, features = rows[step % len(rows)]
        places, documents = torch.arange(len(whole)), torch.zeros(len(whole), dtype=torch.long)
        mask = places >= prompt
        anchors = draw_anchors(valid_anchors(mask, documents), 16, seed=0, epoch=0, index=step)
        blocks = make_blocks(
            whole, mask, places, documents, anchors, block_size=made.spec.block_size, mask_token_id=MASK, gamma=4.0
        )
        blocks = attention.trim_padding(blocks)
        attend = attention.dense(made.spec, blocks, documents, places)
        loss, _ = block_loss(
            made, features, places, blocks, embedding=embedding, head=head, attend=attend, chunk_rows=256
        )
        (loss / blocks.weights.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return made.eval().requires_grad_(False)
