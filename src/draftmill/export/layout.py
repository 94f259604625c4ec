"""The z-lab layout: `config.json` of a drafter, written from its description and read back without guessing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftmill.drafter.config import SLIDING, DrafterSpec
from draftmill.errors import UserError

ARCHITECTURE = "DFlashDraftModel"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "num_target_layers",
    "max_position_embeddings",
)
# What the layout can express and this drafter does not have: value that means "not used".
UNUSED = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}


def to_config(spec: DrafterSpec, dtype: torch.dtype, extra: dict[str, Any]) -> dict[str, Any]:
    """The dict for config.json. Raises UserError for a causality that the layout cannot say.

    extra: JSON-able notes about the run, stored under `draftmill` and read by no engine.
    """
    causal = causality(spec)
    slides = SLIDING in spec.layer_types
    dflash: dict[str, Any] = {
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.taps),
        "block_size": spec.block_size,
    }
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        **{name: getattr(spec, name) for name in SIZES},
        "num_hidden_layers": spec.layers,
        "layer_types": list(spec.layer_types),
        "sliding_window": spec.sliding_window,
        "use_sliding_window": slides,  # without it transformers drops the window
        "max_window_layers": spec.layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "rope_theta": spec.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "use_cache": True,
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": spec.block_size,
        **({} if causal is None else {"is_causal": causal}),
        "dflash_config": dflash | ({} if causal is None else {"causal": causal}),
        "draftmill": extra,
    }


def causality(spec: DrafterSpec) -> bool | None:
    """What `is_causal` has to be: one value for all layers, or None to leave it out.

    Left out, engines take sliding layers as causal inside the block and full layers as not; so a mixed drafter can only
    be said if that is what it is.
    """
    if len(set(spec.layer_causal)) == 1:
        return spec.layer_causal[0]
    if spec.layer_causal == tuple(kind == SLIDING for kind in spec.layer_types):
        return None
    raise UserError(
        f"drafter: layers {list(spec.layer_types)} are causal as {list(spec.layer_causal)}, which no checkpoint can "
        "say: engines know one value for all layers, or causal exactly where a layer slides. Train one of these"
    )


def from_config(config: dict[str, Any], path: Path) -> tuple[DrafterSpec, torch.dtype]:
    """The description that a config.json states. Raises UserError for anything missing, contradictory or unsupported;
    nothing is guessed."""
    reader = _Reader(config, path)
    dflash = _Reader(reader.get("dflash_config"), path, "dflash_config.")
    if ARCHITECTURE not in reader.get("architectures"):
        raise _refuse(path, f"architectures is {config['architectures']}, not {ARCHITECTURE}")
    for name, unused in UNUSED.items():
        value = dflash.values.get(name, config.get(name))
        if value is not None and value != unused:
            raise _refuse(path, f"{name} is {value}, which is not implemented")
    types = tuple(reader.get("layer_types"))
    if len(types) != reader.get("num_hidden_layers"):
        raise _refuse(path, f"layer_types has {len(types)} entries for {config['num_hidden_layers']} num_hidden_layers")
    spec = DrafterSpec(
        **{name: reader.get(name) for name in SIZES},
        rope_theta=_rope_theta(config, path),
        block_size=_block_size(config, dflash.values, path),
        mask_token_id=dflash.get("mask_token_id"),
        taps=tuple(dflash.get("target_layer_ids")),
        layer_types=types,
        layer_causal=_layer_causal(config, dflash.values, types, path),
        sliding_window=_window(reader, types, path),
    )
    return spec, _dtype(reader.get("dtype"), path)


class _Reader:
    """Required keys of one JSON object."""

    def __init__(self, values: Any, path: Path, prefix: str = "") -> None:
        self.values: dict[str, Any] = values if isinstance(values, dict) else {}
        self._path, self._prefix = path, prefix

    def get(self, name: str) -> Any:
        if self.values.get(name) is None:
            raise _refuse(self._path, f"{self._prefix}{name} is missing, and guessing it would spoil the drafts")
        return self.values[name]


def _refuse(path: Path, what: str) -> UserError:
    return UserError(f"{path}: {what}; the drafter was not loaded. Export it again, or correct the file")


def _rope_theta(config: dict[str, Any], path: Path) -> float:
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling")
    if scaling is not None or parameters.get("rope_type", "default") != "default":
        raise _refuse(path, f"the rotary embedding is scaled ({scaling or parameters}), which is not implemented")
    stated = {value for value in (config.get("rope_theta"), parameters.get("rope_theta")) if value is not None}
    if len(stated) != 1:
        raise _refuse(path, f"rope_theta must be stated once or the same everywhere, but is {sorted(stated)}")
    return float(stated.pop())


def _block_size(config: dict[str, Any], dflash: dict[str, Any], path: Path) -> int:
    stated = {value for value in (config.get("block_size"), dflash.get("block_size")) if value is not None}
    if len(stated) != 1:
        raise _refuse(path, f"block_size must be stated once or the same everywhere, but is {sorted(stated)}")
    return int(stated.pop())


def _layer_causal(
    config: dict[str, Any], dflash: dict[str, Any], types: tuple[str, ...], path: Path
) -> tuple[bool, ...]:
    stated = {value for value in (config.get("is_causal"), dflash.get("causal")) if value is not None}
    if len(stated) > 1:
        raise _refuse(path, "is_causal and dflash_config.causal contradict each other")
    return tuple(stated.copy().pop() if stated else kind == SLIDING for kind in types)


def _window(reader: _Reader, types: tuple[str, ...], path: Path) -> int | None:
    if SLIDING not in types:
        return None
    if not reader.get("use_sliding_window"):
        raise _refuse(path, "layer_types has sliding layers but use_sliding_window is false, which drops their window")
    return int(reader.get("sliding_window"))


def _dtype(name: str, path: Path) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise _refuse(path, f"dtype {name} is none of float32, bfloat16, float16")
    return dtype
