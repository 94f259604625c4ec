"""How the drafter is trained. The defaults are the recipe of arXiv 2602.06036."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TrainConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    epochs: int = Field(6, ge=1, description="Passes over the prepared set. Anchors are drawn anew in each.")
    max_steps: int | None = Field(
        None, ge=1, description="End after this many optimizer steps; the learning rate follows this length."
    )
    max_minutes: float | None = Field(
        None, gt=0, description="Save and end once training has taken this long, even if the schedule is not done."
    )
    anchors: int | None = Field(
        None,
        ge=1,
        description="N: anchors drawn from each batch. Left out: one per 8 tokens of the budget (512 of 4096).",
    )
    accumulation: int = Field(
        1,
        ge=1,
        description="Batches per optimizer step, over all drafter ranks together; the number of ranks must divide it. "
        "So the same config makes the same drafter on any number of devices.",
    )
    gamma: float | None = Field(
        None, gt=0, description="γ of the slot weights exp(−(k−1)/γ). Left out: 7 / 5 / 4 for blocks of 16 / 10 / 8."
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon: Muon for the matrices (its updates scaled to AdamW's size, so lr means the same), AdamW for "
        "the norms. Not with parallel: fsdp.",
    )
    lr: float = Field(6e-4, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's decay rates.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay, on matrices only.")
    warmup_ratio: float = Field(0.04, ge=0, lt=1, description="Share of the steps with a linearly rising rate.")
    clip: float = Field(1.0, gt=0, description="Gradients are scaled down to this norm.")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Precision of the drafter's arithmetic; its master weights are always float32."
    )
    kernels: Literal["fused", "plain"] = Field(
        "fused",
        description="How a GPU computes the step. fused: few launches and little memory, in bfloat16; plain: the "
        "reference, several times slower. A CPU always computes the plain step.",
    )
    fp8: Literal["none", "head", "all"] = Field(
        "none",
        description="Matrix products in 8-bit floats, on GPUs that have them (compute capability 8.9 or higher) and "
        "with kernels: fused. head: the products with the frozen head of the target; all: also those of the drafter's "
        "own matrices, but the gradients of these stay as they are. At the 27B shape 1.15 and 1.43 times as fast; the "
        "loss ends up to 3 % higher: see [gpu.md](gpu.md).",
    )
    log_every: int = Field(10, ge=1, description="Optimizer steps between two lines of metrics.jsonl.")
    save_every: int = Field(500, ge=1, description="Optimizer steps between two checkpoints.")
    keep: int = Field(2, ge=1, description="Checkpoints kept; older ones are removed.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {list(self.betas)}")
        return self
