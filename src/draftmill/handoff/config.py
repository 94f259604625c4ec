"""What the user may say about the queue between targets and drafters."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class HandoffConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    slots: int | None = Field(
        None,
        ge=1,
        description="Batches of hidden states that may be on their way or waiting, for each drafter rank. Bounds the "
        "memory: slots × the size of a batch's states, printed at the start. Left out: two for each target, shared "
        "among the ranks, and one more.",
    )
    queue: Literal["auto", "host", "device"] = Field(
        "auto",
        description="Where the slots lie. host: memory that all processes share, page-locked for GPUs; device: the "
        "memory of the drafter's GPU, written by the targets' GPUs directly. auto: device where the GPUs reach each "
        "other.",
    )
    lease_seconds: float = Field(
        60.0,
        ge=2,  # signs of life come once a second
        description="A target that gives no sign of life for so long loses its batch to another, and is started anew "
        "if it stays silent.",
    )
    hang_seconds: float = Field(
        1800.0,
        gt=0,
        description="A worker that lives but has finished nothing for so long, with work to do, is started anew.",
    )
