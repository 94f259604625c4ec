"""What the user may say about the target."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TargetConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="Folder or hub id of a transformers causal language model.")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Precision of the target's weights and hidden states."
    )
    isolation: Literal["auto", "packed", "rows"] = Field(
        "auto",
        description="How documents of a batch are kept apart: `packed` runs them as one row with attention per "
        "document, `rows` runs each as a row of its own. `auto` tries packed on two small documents at start and takes "
        "rows where that would leak; which one is used is printed.",
    )
    reuse_states_gb: float = Field(
        0.0,
        ge=0,
        description="Keep hidden states of up to this many GB (10^9 bytes) in memory and use them again in later "
        "epochs instead of running the target. 0: every epoch runs the target.",
    )
    trust_remote_code: bool = Field(False, description="Allow model code that comes with the checkpoint to run.")
