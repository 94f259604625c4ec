"""What the user may say about an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn


class EvaluateConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: Path = Field(
        description="JSON Lines file. A row has `messages` (or `conversations`), whose prompt is everything up to the "
        "last assistant turn, or `prompt`, one user turn as a string. `source`, where a row has it, names its slice."
    )
    max_new_tokens: int = Field(256, ge=1, description="Tokens per answer, unless a stop token comes first.")
    limit: int | None = Field(None, ge=1, description="Use only the first so many prompts. Left out: all.")
    temperature: float = Field(
        0.0, ge=0.0, description="0: greedy, compared token for token with the target alone. Above: sampling."
    )
    dtype: Literal["float32", "bfloat16", "auto"] = Field(
        "auto",
        description="Precision of target and drafter. `auto` is float32 on a CPU and the target's own on CUDA. In "
        "bfloat16 a forward of one token and one of a block round differently, so where the target's two best tokens "
        "nearly tie, its answer may differ from its own answer token by token; such places are reported with the gap.",
    )
    seed: int = Field(0, ge=0, description="Of the draws at a temperature above 0.")


def resolve_dtype(dtype: str, model: nn.Module) -> torch.dtype:
    """The precision an evaluation of `model`, which lies on its device, runs in."""
    weight = next(model.parameters())
    if dtype != "auto":
        resolved: torch.dtype = getattr(torch, dtype)
        return resolved
    return weight.dtype if weight.is_cuda else torch.float32
