"""Settings of preparing a data set and of reading it in training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

# Names the renderer itself passes to the template; a user's value for one of them would be overwritten or break it.
RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "conversations", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "return_assistant_tokens_mask", "tokenize"}
)


def available_cpus() -> int:
    """CPUs this process may use; fewer than the machine's in a container or under a batch system."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class PrepareConfig(BaseModel):
    """What `prepare` reads, with whose tokenizer, and where it writes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: list[Path] = Field(
        min_length=1, description="Files of conversations: .jsonl, .jsonl.gz, .jsonl.zst or .parquet, read in order."
    )
    output: Path = Field(description="Folder to write the prepared set to.")
    model: str = Field(description="Folder, .gguf file or hub id of the target, for its tokenizer and chat template.")
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments for the chat template, such as enable_thinking: false. Must be those used when serving.",
    )
    turns: Literal["all", "last"] = Field(
        default="all", description="Which assistant turns are trained: all of them, or only the last of a conversation."
    )
    max_tokens: int | None = Field(
        default=None, ge=2, description="Documents longer than this many tokens are cut at the end. None: never cut."
    )
    mask_token_id: int | None = Field(
        default=None, ge=0, description="Rows whose text holds this token are dropped. None: no row is dropped for it."
    )
    workers: int = Field(default_factory=available_cpus, ge=1, description="Processes that tokenise. Default: CPUs.")

    @field_validator("template_kwargs")
    @classmethod
    def _no_reserved_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(RESERVED_TEMPLATE_NAMES & value.keys()):
            raise ValueError(f"{', '.join(taken)} is set by draftmill itself; remove it from template_kwargs")
        return value


class DataConfig(BaseModel):
    """What training reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prepared: Path = Field(description="Folder written by `draftmill prepare`.")
    token_budget: int = Field(
        default=16384, ge=16, description="Tokens in a batch, padding included; longer documents are cut to it."
    )
