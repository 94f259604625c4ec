"""What may change between a run and its resumption, and what may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftmill.config import RunConfig, read_yaml
from draftmill.drafter.config import DrafterSpec
from draftmill.errors import UserError
from draftmill.train.checkpoint import Checkpoint


def changes(stored: Path, config: RunConfig) -> list[str]:
    """One line per key whose value differs from the stored config: "train.lr 0.0006 → 0.0003"."""
    if not stored.exists():
        return []
    before, after = _flat(read_yaml(stored)), _flat(config.model_dump(mode="json"))
    keys = sorted(before.keys() | after.keys())
    return [f"{key} {before.get(key)} → {after.get(key)}" for key in keys if before.get(key) != after.get(key)]


def check_resumable(checkpoint: Checkpoint, spec: DrafterSpec, identity: dict[str, Any]) -> None:
    """Refuse to go on with another drafter, other data or another order of batches: it would not be the same run."""
    before: dict[str, Any] = {**checkpoint.state, **checkpoint.state["spec"]}
    after: dict[str, Any] = {**identity, **_jsonable(spec.to_dict())}
    differing = [f"{key} was {before.get(key)}, is {value}" for key, value in after.items() if before.get(key) != value]
    if differing:
        raise UserError(
            f"cannot resume {checkpoint.path}: {'; '.join(differing)}. Put that back, or start anew in another run_dir"
        )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _jsonable(values: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
