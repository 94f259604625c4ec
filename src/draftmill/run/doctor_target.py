"""What `draftmill doctor` finds about a run's target: its weights, its layers, and its states that are on disk already.

GB = 10^9 bytes. No weight is loaded.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftmill.config import RunConfig
from draftmill.run.build import Built
from draftmill.run.doctor import Finding, Level, not_writable
from draftmill.run.doctor_checks import REFUSED, TARGET, Parts, attempt
from draftmill.run.states import bins_of
from draftmill.target.cache import CacheIdentity, StateCache, read_identity, target_files
from draftmill.target.cache_files import SHARED_FILE, claim, refuse_foreign

RECURRENT = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"}  # layer types that carry a state along
LIBRARIES = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}


def weights(config: RunConfig, target: Any, *, needed: bool) -> tuple[Finding, int | None]:
    """Whether the target's weights are on this disk and whole, and the bytes that they take when loaded, if known.

    needed: not all states come from the cache.
    """
    folder = model_folder(config.target.model)
    files = [] if folder is None else weight_files(folder)
    missing = [path.name for path in files if not path.is_file()]
    if folder is None or not files or missing:
        return _absent(config.target.model, missing, needed=needed), None
    try:
        numbers = sum(map(count_numbers, files)) if files[0].suffix == ".safetensors" else None
    except ValueError as error:
        return _unusable(str(error), needed=needed), None
    size = sum(path.stat().st_size for path in files)
    found = f"{len(files)} file{'s' if len(files) > 1 else ''} of {size / 1e9:.2f} GB in {folder}"
    if numbers is None or getattr(target, "quantization_config", None):
        return Finding(TARGET, "weights", "ok", f"{found}; taken to need as much when loaded"), size
    loaded = numbers * _itemsize(config)
    return Finding(TARGET, "weights", "ok", f"{found}; {loaded / 1e9:.2f} GB as {config.target.dtype}"), loaded


def _absent(model: str, missing: list[str], *, needed: bool) -> Finding:
    if Path(model).is_dir():
        what = f"lacks {', '.join(missing[:3])}" if missing else "holds no model.safetensors or pytorch_model.bin"
        return _unusable(f"{model} {what}", needed=needed)
    consequence = "`train` fetches it first, which may take long; how much memory it needs is not known here"
    remedy = f"fetch it before: hf download {model}"
    return Finding(TARGET, "weights", "warning", f"{model} is not on this disk as a whole", consequence, remedy)


def _unusable(found: str, *, needed: bool) -> Finding:
    level: Level = "error" if needed else "warning"
    consequence = "the target cannot be loaded" + ("" if needed else "; all states are in the cache, so none is")
    return Finding(TARGET, "weights", level, found, consequence, "copy or download the target again")


def model_folder(model: str) -> Path | None:
    """Where the target's files lie. None where nothing of a hub id has been fetched yet."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read, in its order of preference, whether they exist or not."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            return [folder / part for part in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return []


def count_numbers(path: Path) -> int:
    """Numbers in a safetensors file, from its header. ValueError where it is damaged or cut short."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short ({error})") from None


def recurrent_layers(config: RunConfig, parts: Parts) -> Iterator[Finding]:
    """Layers that carry a state from token to token, up to the last tap: how documents are kept apart, how fast."""
    spec, placement, target = parts.spec, parts.placement, parts.target
    if spec is None or placement is None:
        return
    kinds = list(getattr(target, "layer_types", None) or [])[: spec.taps[-1] + 1]
    count = sum(kind in RECURRENT for kind in kinds)
    if not count:
        return
    found = f"{count} of the {len(kinds)} layers that are run carry a state from token to token"
    if config.target.isolation == "packed":
        consequence = "packed documents leak into each other; `draftmill train` refuses this once the target is loaded"
        yield Finding(TARGET, "isolation", "error", found, consequence, "target.isolation=auto")
    else:
        yield Finding(TARGET, "isolation", "ok", f"{found}: each document is run as a row of its own")
    if any(device.startswith("cuda") for device in placement.targets or placement.drafters):
        yield from _libraries(target)


def _libraries(target: Any) -> Iterator[Finding]:
    """Those that the model's own code asks for; without one it takes a substitute in plain torch."""
    code = "".join(path.read_text() for path in modeling_files(target))
    for module, package in LIBRARIES.items():
        if re.search(rf"\b{module}\b", code) is None:
            continue
        if importlib.util.find_spec(module) is not None:
            yield Finding(TARGET, package, "ok", "installed; this target's code uses it")
        else:
            found, consequence = f"not installed, but {target.model_type} asks for it", "its layers run far slower"
            yield Finding(TARGET, package, "warning", found, consequence, f"pip install {package}")


def modeling_files(target: Any) -> list[Path]:
    """The model's code, found beside that of its config; it is not imported."""
    module = sys.modules[type(target).__module__]
    return sorted(Path(str(module.__file__)).parent.glob("modeling_*.py"))


@dataclass(slots=True)
class Cache:
    """missing_bytes: still to be written. complete: every state of the run is there, so no target is needed."""

    findings: list[Finding] = field(default_factory=list)
    missing_bytes: int = 0
    complete: bool = False


def look_at_cache(config: RunConfig, parts: Parts) -> Cache:
    """The hidden states on disk, as `train` would find them."""
    folder, built, found = config.cache, parts.built, Cache()
    if folder is None or built is None:
        return found
    if why := not_writable(folder):
        found.findings.append(Finding(TARGET, "cache", "error", why, REFUSED, "choose another folder for cache"))
        return found
    attempt(found.findings, TARGET, "cache", lambda: refuse_foreign(folder))
    known = attempt(found.findings, TARGET, "cache", lambda: read_identity(folder))
    if found.findings:
        return found
    wanted = _identity(config, built, known)
    if known is not None or any(folder.glob("*.safetensors")):  # `claim` writes nothing then
        attempt(found.findings, TARGET, "cache", lambda: claim(folder, wanted))
    if not found.findings:
        _look_inside(config, built, folder, wanted, found)
        if not (folder / SHARED_FILE).is_file():
            matrices = 1 if getattr(parts.target, "tie_word_embeddings", False) else 2
            found.missing_bytes += matrices * built.spec.vocab_size * built.spec.hidden_size * _itemsize(config)
    return found


def _identity(config: RunConfig, built: Built, known: CacheIdentity | None) -> CacheIdentity:
    """Of this run's states. What only the loaded target could tell is taken from the cache that is there."""
    isolation = config.target.isolation
    return CacheIdentity(
        target_fingerprint="" if known is None else known.target_fingerprint,
        target_files=target_files(config.target.model),
        dtype=config.target.dtype,
        isolation=known.isolation if known is not None and isolation == "auto" else isolation,
        taps=built.spec.taps,
        hidden_size=built.spec.hidden_size,
        data_fingerprint=built.prepared.info.fingerprint,
        token_budget=config.data.token_budget,
        seed=config.seed,
    )


def _look_inside(config: RunConfig, built: Built, folder: Path, identity: CacheIdentity, found: Cache) -> None:
    slot_bytes = config.data.token_budget * built.width * _itemsize(config)
    limit = None if config.cache_gb is None else round(config.cache_gb * 1e9)
    bins = built.plan.batches_per_epoch
    cache = StateCache(folder, identity, slot_bytes=slot_bytes, bins=bins, limit_bytes=limit, warn=lambda _: None)
    if folder.is_dir():
        attempt(found.findings, TARGET, "cache", cache.check_space)
        wanted = bins_of(built.plan, 0, built.total_steps * config.train.accumulation)
        found.complete = (folder / SHARED_FILE).is_file() and cache.complete(wanted)
    present = len(list(folder.glob("bin-*.safetensors")))
    found.missing_bytes = max(0, cache.kept_bins - present) * slot_bytes
    if found.findings:
        return
    text = f"{folder}: {present} bins there, {cache.kept_bins} of {bins} to be kept"
    if found.complete:
        text += "; all states of this run are there, so no target is loaded"
    if cache.kept_bins:
        found.findings.append(Finding(TARGET, "cache", "ok", text))
    else:
        consequence = f"cache_gb is less than the {slot_bytes / 1e9:.3f} GB of a bin: nothing is kept"
        found.findings.append(
            Finding(TARGET, "cache", "warning", text, consequence, "raise cache_gb, or leave cache out")
        )


def _itemsize(config: RunConfig) -> int:
    return int(getattr(torch, config.target.dtype).itemsize)
