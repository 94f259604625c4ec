"""Sizes of a target, read from its config alone: known before a weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftmill.errors import UserError


@dataclass(frozen=True, slots=True)
class TargetShape:
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float | None
    layers: int
    vocab_size: int
    max_position_embeddings: int


def load_config(model: str, *, trust_remote_code: bool = False) -> Any:
    """The target's transformers config (of its text part, where it has several)."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"target.model: {model!r} is not a transformers model folder or a reachable hub id ({reason}); "
            "give the folder that holds its config.json"
        ) from error
    return config.get_text_config()


def read_shape(config: Any) -> TargetShape:
    """The sizes in a transformers config. A missing one is an error that names it."""

    def need(name: str) -> Any:
        value = getattr(config, name, None)
        if value is None:
            raise UserError(f"the target's config ({config.model_type}) has no {name}; draftmill cannot size a drafter")
        return value

    heads = int(need("num_attention_heads"))
    hidden = int(need("hidden_size"))
    return TargetShape(
        hidden_size=hidden,
        intermediate_size=int(need("intermediate_size")),
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        rope_theta=_rope_theta(config),
        layers=int(need("num_hidden_layers")),
        vocab_size=int(need("vocab_size")),
        max_position_embeddings=int(need("max_position_embeddings")),
    )


def _rope_theta(config: Any) -> float | None:
    """The base of the target's (full-attention) rotary embedding; None where it has none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention") or parameters
    theta = parameters.get("rope_theta", getattr(config, "rope_theta", None))
    return None if theta is None else float(theta)
