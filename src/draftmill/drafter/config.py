"""What the user may say about the drafter, and the complete description that follows from it and the target."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

FULL, SLIDING = "full_attention", "sliding_attention"


class DrafterConfig(BaseModel):
    """Sizes left out follow the target, so that its embedding and head fit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: int = Field(5, ge=1, description="Number of draft layers.")
    block_size: int = Field(
        16, ge=2, le=128, description="B: tokens of a block, the bonus token and B−1 drafted ones. 16 is the paper's."
    )
    taps: list[int] | None = Field(
        None,
        description="0-based target layers whose outputs feed the drafter. Left out: one per draft layer (at least "
        "two), spread evenly from layer 1 to the fourth from the end, as in the paper.",
    )
    mask_token_id: int | None = Field(
        None,
        ge=0,
        description="Id that stands for a token to be drafted; no real text may produce it. Left out: an unused row of "
        "the target's embedding, and an error where there is none.",
    )
    intermediate_size: int | None = Field(None, ge=1, description="Width of the MLP. Left out: the target's.")
    num_attention_heads: int | None = Field(None, ge=1, description="Query heads. Left out: the target's.")
    num_key_value_heads: int | None = Field(None, ge=1, description="Key/value heads. Left out: the target's.")
    head_dim: int | None = Field(None, ge=2, description="Size of a head. Left out: the target's.")
    rms_norm_eps: float | None = Field(None, gt=0, description="Left out: the target's.")
    rope_theta: float | None = Field(None, gt=0, description="Base of the rotary embedding. Left out: the target's.")
    sliding_window: int | None = Field(
        None, ge=1, description="W: a sliding layer sees only keys nearer than W positions. Needs layer_types."
    )
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = Field(
        None, description="One entry per layer. Left out: all full_attention."
    )
    is_causal: bool | None = Field(
        None,
        description="Whether a block's slots see only earlier slots. Left out: sliding layers are causal inside the "
        "block and full layers are not, which is what serving engines assume of a checkpoint that says nothing.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        types = self.layer_types
        if types is not None and len(types) != self.layers:
            raise ValueError(f"layer_types names {len(types)} layers but layers is {self.layers}; make them agree")
        slides = types is not None and SLIDING in types
        if slides and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention but sliding_window is not set; set it, e.g. 2048")
        if self.sliding_window is not None and not slides:
            raise ValueError("sliding_window is set but no layer slides; give layer_types with sliding_attention")
        if self.taps is not None and (len(self.taps) == 0 or sorted(set(self.taps)) != self.taps):
            raise ValueError(f"taps must be increasing layer ids without repeats, got {self.taps}")
        return self


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """Everything that defines a drafter's computation. Stored in every checkpoint; nothing is guessed on load."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    layer_types: tuple[str, ...]
    layer_causal: tuple[bool, ...]
    sliding_window: int | None
    vocab_size: int
    num_target_layers: int
    max_position_embeddings: int

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    def window(self, layer: int) -> int | None:
        """W of a sliding layer, None for a full one."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild from `to_dict` (or its JSON). A missing or unknown key is an error, never a default."""
        lists = {"taps", "layer_types", "layer_causal"}
        fields: dict[str, Any] = {key: tuple(value) if key in lists else value for key, value in values.items()}
        return cls(**fields)


def default_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """round(1 + i·(N−4)/(count−1)) for i = 0 … count−1: the layers of arXiv 2602.06036 for an N-layer target.

    A single tap takes the middle layer. Targets too small for `count` different layers give fewer.
    """
    if count == 1:
        return (num_target_layers // 2,)
    span = max(num_target_layers - 4, 0)
    picks = {min(round(1 + i * span / (count - 1)), num_target_layers - 1) for i in range(count)}
    return tuple(sorted(picks))


def layer_kinds(config: DrafterConfig) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """(layer_types, layer_causal) with the rule for an unset `is_causal`: sliding layers are causal, full ones not."""
    types = tuple(config.layer_types) if config.layer_types is not None else (FULL,) * config.layers
    causal = tuple(t == SLIDING if config.is_causal is None else config.is_causal for t in types)
    return types, causal
