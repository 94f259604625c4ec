"""Where a run starts, and what may change between a run and its resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftmill.config import RunConfig, read_yaml
from draftmill.drafter.config import DrafterSpec
from draftmill.errors import UserError
from draftmill.run.console import say
from draftmill.run.files import RunFolder
from draftmill.train.checkpoint import Checkpoint, find_latest


def starting_point(folder: RunFolder, config: RunConfig, *, resume: bool) -> Checkpoint | None:
    """The checkpoint to go on from, or None to begin. Changes nothing in the folder.

    Raises UserError where a run would be overwritten. Incomplete checkpoints and changed keys are said.
    """
    latest, rejected = find_latest(folder.checkpoints)
    for line in rejected:
        say(f"warning: checkpoint {line}; it is passed over")
    if not resume and (latest is not None or folder.metrics.exists()):
        at = f"at step {latest.step}" if latest else "without a checkpoint"
        raise UserError(
            f"{folder.root} already holds a run {at}; add --resume to go on with it, or set another run_dir"
        )
    if latest is None:
        if resume:
            say(f"nothing to resume in {folder.root}: starting at step 0")
        return None
    say(f"resuming from {latest.path}")
    for line in changes(folder.config, config):
        say(f"config changed since the run began: {line}")
    return latest


def changes(stored: Path, config: RunConfig) -> list[str]:
    """One line per key whose value differs from the stored config: "train.lr 0.0006 → 0.0003"."""
    if not stored.exists():
        return []
    before, after = _flat(read_yaml(stored)), _flat(config.model_dump(mode="json"))
    keys = sorted(before.keys() | after.keys())
    return [f"{key} {before.get(key)} → {after.get(key)}" for key in keys if before.get(key) != after.get(key)]


def check_same_run(checkpoint: Checkpoint, spec: DrafterSpec, identity: dict[str, Any]) -> None:
    """Refuse to go on with another drafter, other data or another order of batches: it would not be the same run."""
    before: dict[str, Any] = {**checkpoint.state, **checkpoint.state["spec"]}
    after: dict[str, Any] = {**identity, **_jsonable(spec.to_dict())}
    differing = [f"{key} was {before.get(key)}, is {value}" for key, value in after.items() if before.get(key) != value]
    if differing:
        raise UserError(
            f"cannot resume {checkpoint.path}: {'; '.join(differing)}. Put that back, or start anew in another run_dir"
        )


def check_same_target(checkpoint: Checkpoint, fingerprint: str) -> None:
    """Refuse other weights, wherever they lie: the drafter has learned the states of these."""
    before = checkpoint.state["target_fingerprint"]
    if before != fingerprint:
        raise UserError(
            f"cannot resume {checkpoint.path}: the target's weights are not those it was trained with (fingerprint was "
            f"{before}, is {fingerprint}). Put them back, or start anew in another run_dir"
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
