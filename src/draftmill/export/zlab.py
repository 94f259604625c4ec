"""Writing and reading a drafter in the layout that z-lab's client, vLLM and SGLang load."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftmill.drafter.config import DrafterSpec
from draftmill.drafter.model import Drafter
from draftmill.errors import UserError
from draftmill.export.card import model_card
from draftmill.export.layout import ARCHITECTURE, from_config, to_config

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"


def export_zlab(
    drafter: Drafter,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    extra: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write config.json, model.safetensors (cast to dtype; no embedding, no head) and a model card; return `folder`.

    extra: JSON-able notes (template arguments, target, origin of the mask token), stored in config.json under
    `draftmill`. The folder appears complete or not at all. Raises UserError for a causality no checkpoint can say, for
    weights that are not finite in dtype, and for a folder that exists: an earlier export is replaced with
    overwrite=True, anything else never.
    """
    folder = folder.absolute()
    _check_free(folder, overwrite)
    config = to_config(drafter.spec, dtype, extra or {})
    tensors = cast_tensors(drafter, dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        partial.chmod(0o755)  # mkdtemp makes it private
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (partial / CARD).write_text(model_card(drafter.spec, dtype, extra or {}), encoding="utf-8")
        _replace(folder, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def load_zlab(folder: Path) -> Drafter:
    """A drafter from config.json and model.safetensors alone, on the CPU, in the checkpoint's dtype.

    Raises UserError when a file or key is missing, names or shapes differ from what the config states, or the tensors'
    dtype is not the config's.
    """
    config = read_config(folder)
    spec, dtype = from_config(config, folder / CONFIG)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS} cannot be read ({error}); not loaded. Export it again") from None
    drafter = empty_drafter(spec)
    _check_tensors(tensors, drafter, dtype, folder / WEIGHTS)
    drafter.load_state_dict(tensors, assign=True)
    return drafter.eval()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of an exported drafter."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); no drafter was loaded. Give an exported folder") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object; no drafter was loaded. Give an exported folder")
    return config


def cast_tensors(drafter: Drafter, dtype: torch.dtype) -> dict[str, Tensor]:
    """What is written: every parameter under its own name, detached, on the CPU, contiguous, in dtype."""
    tensors = {
        name: value.detach().to("cpu", dtype).contiguous().clone() for name, value in drafter.state_dict().items()
    }
    bad = next((name for name, value in tensors.items() if not bool(value.isfinite().all())), None)
    if bad is not None:
        raise UserError(
            f"weight {bad} is not finite in {str(dtype).removeprefix('torch.')}; nothing was exported. Export an "
            "earlier checkpoint, or choose another dtype"
        )
    return tensors


def empty_drafter(spec: DrafterSpec) -> Drafter:
    """Shapes without memory, to be filled from a checkpoint."""
    with torch.device("meta"):
        return Drafter(spec)


def _check_tensors(tensors: dict[str, Tensor], drafter: Drafter, dtype: torch.dtype, path: Path) -> None:
    wanted = drafter.state_dict()
    if wrong := sorted(set(wanted) ^ set(tensors)):
        what = "is missing" if wrong[0] in wanted else "does not belong to a drafter"
        raise UserError(f"{path}: tensor {wrong[0]} {what} ({len(wrong)} differ); not loaded. Export it again")
    for name, value in tensors.items():
        if value.shape != wanted[name].shape or value.dtype != dtype:
            raise UserError(
                f"{path}: {name} is {list(value.shape)} {value.dtype} but config.json states "
                f"{list(wanted[name].shape)} {dtype}; not loaded. Export it again"
            )


def _check_free(folder: Path, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not is_export(folder):
        raise UserError(f"{folder} exists and is no exported drafter; nothing was written. Choose another folder")
    if not overwrite:
        raise UserError(f"{folder} already holds an export; nothing was written. Pass overwrite to replace it")


def is_export(folder: Path) -> bool:
    """Whether a folder holds a drafter in this layout, whole or not."""
    try:
        return ARCHITECTURE in read_config(folder).get("architectures", [])
    except UserError:
        return False


def _replace(folder: Path, partial: Path) -> None:
    """Rename into place; an earlier export stays readable until then."""
    if not folder.exists():
        partial.rename(folder)
        return
    earlier = Path(tempfile.mkdtemp(prefix=f".{folder.name}.earlier-", dir=folder.parent))
    folder.rename(earlier / folder.name)
    partial.rename(folder)
    shutil.rmtree(earlier)
