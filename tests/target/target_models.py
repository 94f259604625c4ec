"""Small random targets on disk, batches of random documents, and their states by the plainest way there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from draftmill.records import PADDING_DOCUMENT, TokenBatch
from draftmill.target.capture import Target
from draftmill.target.config import TargetConfig

VOCAB, HIDDEN, LAYERS = 97, 32, 4
WINDOW = 6
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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRID = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
# name → (config class, model class, changes to SIZES)
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": WINDOW}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS),
    "hybrid": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", HYBRID),
    "sinks": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "softcap": ("Gemma2Config", "Gemma2ForCausalLM", {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0}),
}


def build(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    config_class, model_class, own = ARCHITECTURES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**(SIZES | own | changes))
    model = getattr(transformers, model_class)(config).eval().requires_grad_(False)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            parameter.normal_()
    return model


def save(folder: Path, name: str, seed: int = 0, **changes: Any) -> Path:
    build(name, seed, **changes).save_pretrained(folder)
    return folder


def load(folder: Path, taps: tuple[int, ...] = (0, 2), **options: Any) -> Target:
    return Target(TargetConfig(model=str(folder), **({"dtype": "float32"} | options)), taps)


def documents(lengths: list[int], *, vocab: int = VOCAB, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (length,), generator=generator, dtype=torch.int32) for length in lengths]


def batch_of(texts: list[Tensor], budget: int | None = None, *, index: int = 0, bin: int = 0) -> TokenBatch:
    """The documents in one batch, padded to `budget`; document d has number 100 + d in the prepared set."""
    total = sum(len(text) for text in texts)
    padding = (total if budget is None else budget) - total
    pad = [torch.zeros(padding, dtype=torch.int32)]
    numbers = [torch.full((len(text),), d, dtype=torch.int32) for d, text in enumerate(texts)]
    return TokenBatch(
        input_ids=torch.cat(texts + pad),
        loss_mask=torch.cat([torch.ones(total, dtype=torch.bool), torch.zeros(padding, dtype=torch.bool)]),
        position_ids=torch.cat([torch.arange(len(text), dtype=torch.int32) for text in texts] + pad),
        document_ids=torch.cat([*numbers, torch.full((padding,), PADDING_DOCUMENT, dtype=torch.int32)]),
        documents=tuple(100 + d for d in range(len(texts))),
        index=index,
        bin=bin,
        epoch=0,
    )


def captured(target: Target, batch: TokenBatch) -> Tensor:
    """The batch's features, into a buffer full of NaN: whatever is not written shows."""
    features = torch.full((batch.token_budget, target.features_width), torch.nan, dtype=target.dtype)
    target.capture(batch, features)
    return features


def plain_model(folder: Path, dtype: str = "float32", **options: Any) -> nn.Module:
    """The checkpoint as transformers itself loads it, with the attention it picks itself."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **options)
    return model.eval().requires_grad_(False)


def plain_states(model: nn.Module, text: Tensor, layers: tuple[int, ...]) -> list[Tensor]:
    """Output [n, H] of each of these layers, by forward hooks, of one document alone."""
    states: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            states[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    decoder = model.get_decoder()
    hooks = [decoder.layers[layer].register_forward_hook(keep(layer)) for layer in layers]
    with torch.no_grad():
        model(input_ids=text[None].long(), use_cache=False)
    for handle in hooks:
        handle.remove()
    return [states[layer] for layer in layers]


def plain_features(model: nn.Module, texts: list[Tensor], layers: tuple[int, ...]) -> Tensor:
    """[Σ n, K·H] of documents, each run alone."""
    return torch.cat([torch.cat(plain_states(model, text, layers), dim=1) for text in texts])


def gap(got: Tensor, wanted: Tensor) -> float:
    """Largest relative error of a token's state (Euclidean); NaN stays NaN and so passes no comparison."""
    got, wanted = got.double(), wanted.double()
    return float(((got - wanted).norm(dim=1) / wanted.norm(dim=1)).max())
