"""Checkpoints: complete or absent, never half.

A checkpoint is a folder `step-00000123` with `drafter.safetensors` (fp32 masters), `optimizer.safetensors`,
`state.json` (spec, progress, provenance) and `manifest.json` (SHA-256 of the others). It is written under a temporary
name, flushed to disk and renamed; the manifest is written last. A folder without a manifest that matches is not a
checkpoint, whatever its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftmill.drafter.config import DrafterSpec
from draftmill.drafter.model import Drafter
from draftmill.errors import UserError

FORMAT = 1


class AnyOptimizer(Protocol):
    """One or several of torch's, with the groups and the state of all."""

    param_groups: list[dict[str, Any]]
    state: Any


FILES = ("drafter.safetensors", "optimizer.safetensors", "state.json")
_PREFIX = "step-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk. `state` is its state.json."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def spec(self) -> DrafterSpec:
        return DrafterSpec.from_dict(self.state["spec"])


def save_checkpoint(
    folder: Path,
    step: int,
    spec: DrafterSpec,
    weights: dict[str, Tensor],
    moments: dict[str, Tensor],
    state: dict[str, Any],
    *,
    keep: int,
) -> Path:
    """Write the step's folder atomically, then tidy up. Raises OSError when the disk is full.

    weights: the drafter's state_dict; moments: `optimizer_tensors`; state: JSON-able.

    Kept are the newest `keep` up to this step. Newer folders are damaged ones that the run went on before; they and
    what a killed save left behind are removed. A step that is saved already is not written again.
    """
    final = folder / f"{_PREFIX}{step:08d}"
    if _read(final)[0] is None:
        full = {"format": FORMAT, "step": step, "spec": spec.to_dict(), **state}
        _write(final, weights, moments, full)
    older = [path for path in _folders(folder) if path.name <= final.name]
    newer = [path for path in _folders(folder) if path.name > final.name]
    for path in [*older[keep:], *newer, *folder.glob(f".{_PREFIX}*.partial")]:
        shutil.rmtree(path)
    return final


def _write(final: Path, weights: dict[str, Tensor], moments: dict[str, Tensor], state: dict[str, Any]) -> None:
    temporary = final.with_name(f".{final.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save_file(weights, temporary / "drafter.safetensors")
        save_file(moments, temporary / "optimizer.safetensors")
        (temporary / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True))
        manifest = {name: _digest(temporary / name) for name in FILES}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for name in (*FILES, "manifest.json"):
            _flush(temporary / name)
        _flush(temporary)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one
        temporary.rename(final)
        _flush(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def find_latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint, and one line for each newer folder that is not complete."""
    rejected: list[str] = []
    for path in _folders(folder):
        checkpoint, reason = _read(path)
        if checkpoint is not None:
            return checkpoint, rejected
        rejected.append(f"{path.name} is not usable ({reason})")
    return None, rejected


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`: a step folder, a run's `checkpoints` folder, or a run folder (then the newest)."""
    if not path.exists():
        raise UserError(f"{path} does not exist; give a run folder or a checkpoint folder")
    if (path / "state.json").exists():
        checkpoint, reason = _read(path)
        if checkpoint is None:
            raise UserError(f"{path} is not a complete checkpoint ({reason}); use another step of the run")
        return checkpoint
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    latest, rejected = find_latest(folder)
    if latest is None:
        detail = "; ".join(rejected) or "it holds none"
        raise UserError(f"no complete checkpoint in {folder}: {detail}; let the run reach its first save")
    return latest


def load_drafter(checkpoint: Checkpoint) -> Drafter:
    """The drafter with its fp32 weights."""
    drafter = Drafter(checkpoint.spec)
    drafter.load_state_dict(load_file(checkpoint.path / "drafter.safetensors"))
    return drafter


def load_optimizer(
    checkpoint: Checkpoint, optimizer: AnyOptimizer, part: Callable[[nn.Parameter, Tensor], Tensor]
) -> None:
    """Put the saved moments back: of each whole moment of a parameter what `part` says this rank holds. The optimizer
    must hold the same parameters in the same order."""
    tensors = load_file(checkpoint.path / "optimizer.safetensors")
    for number, parameter in enumerate(_parameters(optimizer)):
        prefix = f"{number}."
        saved = {
            key.removeprefix(prefix): part(parameter, value) for key, value in tensors.items() if key.startswith(prefix)
        }
        if saved:
            optimizer.state[parameter] = saved


def optimizer_tensors(optimizer: AnyOptimizer) -> dict[str, Tensor]:
    """Moments and step counts as a flat dict "parameter number.name" → tensor."""
    tensors = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        for name, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{number}.{name}"] = value.contiguous()
    return tensors


def _parameters(optimizer: AnyOptimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _read(path: Path) -> tuple[Checkpoint | None, str]:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name in FILES:
            if _digest(path / name) != manifest.get(name):
                return None, f"{name} differs from its manifest"
        state = json.loads((path / "state.json").read_text())
    except FileNotFoundError as error:
        return None, f"{Path(error.filename).name} is missing"
    except OSError as error:
        return None, f"it cannot be read: {error.strerror}"
    except ValueError:
        return None, "manifest.json or state.json is cut short"
    if state.get("format") != FORMAT:
        return None, f"its format is {state.get('format')}, this version reads {FORMAT}"
    return Checkpoint(path, int(state["step"]), state), ""


def _folders(folder: Path) -> list[Path]:
    """Step folders, newest first."""
    return sorted((p for p in folder.glob(f"{_PREFIX}*") if p.is_dir()), reverse=True) if folder.is_dir() else []


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
