"""Writes docs/configuration.md from the config models: `python -m draftmill.run.reference > docs/configuration.md`."""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from draftmill.config import Devices, RunConfig

INTRO = """# Configuration

`draftmill train` reads one YAML file. These tables list every key. `make docs` writes this page from the code, where
the descriptions are.

- Keys of a section stand below it in the file: `train.lr` is the key `lr` below `train:`.
- `key=value` behind the file's name overrides it: `draftmill train run.yaml train.lr=3e-4 'drafter.taps=[1, 14, 27]'`.
  Values are YAML. A list needs quotes in most shells.
- A key that does not exist is an error, and so is a key given twice. The error names the nearest known key.
- Paths are relative to the folder you give the command in.
- The resolved config, every default written out, is printed at the start and stored in the run folder as `config.yaml`.
- With `--resume` you may change the other keys; draftmill prints what changed. It refuses to go on with another drafter
  (all keys of `drafter`), other data, another `target.model` or `target.dtype`, or another `seed`, `data.token_budget`,
  `train.anchors` or `train.accumulation`.

`prepare`, `regenerate`, `evaluate` and `export` have no config file; their options are shown by `--help`.
"""
HEADER = "| key | type | default | meaning |\n|---|---|---|---|"
SECTIONS = {
    "": ("The run", "Keys at the top of the file."),
    "data": ("data", "What is read. `draftmill prepare` makes it; see [data.md](data.md)."),
    "devices": (
        "devices",
        "Which devices do what, one process each. A device is written `0` or `cuda:0`, or `cpu`; several as `[0, 1]` "
        "or `cpu*2`. Short forms: `devices: auto` (the same as leaving it out), `devices: cpu`, `devices: cuda`. With "
        "one device, `auto` lets target and drafter take turns on it; with several GPUs it measures both sides on one "
        "of them and takes what is fastest. See [operations.md](operations.md).",
    ),
    "handoff": ("handoff", "The queue of hidden states between targets and drafters on different devices."),
    "target": ("target", "The model that is to be served faster. It is never changed."),
    "drafter": ("drafter", "The model that is trained. The words are explained in [concepts.md](concepts.md)."),
    "train": ("train", "How it is trained. Everything here has a default."),
    "tracking": (
        "tracking",
        "Who else is told how the run goes, beside the run's folder. See [tracking.md](tracking.md).",
    ),
}
PLAIN_NAMES: dict[Any, str] = {str: "text", bool: "true or false", int: "integer", float: "number", Path: "path"}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def reference() -> str:
    """The whole page."""
    sections = [_section(prefix, _model_of(prefix), *texts) for prefix, texts in SECTIONS.items()]
    return "\n".join([INTRO, *sections])


def _model_of(prefix: str) -> type[BaseModel]:
    if not prefix:
        return RunConfig
    model = RunConfig.model_fields[prefix].annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    return model


def _section(prefix: str, model: type[BaseModel], title: str, about: str) -> str:
    return "\n".join([f"## {title}", "", about, "", HEADER, *_rows(prefix, model), ""])


def _rows(prefix: str, model: type[BaseModel]) -> list[str]:
    rows = []
    for name, info in model.model_fields.items():
        inner = info.annotation
        if not prefix and name in SECTIONS:
            continue
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            rows += _rows(f"{prefix}.{name}", inner)
        else:
            rows.append(_row(prefix, name, info))
    return rows


def _row(prefix: str, name: str, info: FieldInfo) -> str:
    assert info.description, f"{name} has no description"
    key = f"{prefix}.{name}" if prefix else name
    kind = " ".join([type_name(info.annotation), *_bounds(info)])
    cells = (f"`{key}`", kind, _default(info), info.description.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |"


def type_name(annotation: Any) -> str:
    """A type in plain words: `int | None` is an integer, since leaving the key out is what None means."""
    parts = [part for part in get_args(annotation) if part is not NoneType]
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin is list:
        return f"list of {type_name(parts[0])}"
    if annotation == Devices or parts == [Devices]:
        return "devices"
    if origin is tuple:
        return f"list of {len(parts)} × {type_name(parts[0])}"
    if parts:
        return " or ".join(type_name(part) for part in parts)
    return PLAIN_NAMES[annotation]


def _bounds(info: FieldInfo) -> list[str]:
    limits = [(sign, getattr(item, name, None)) for item in info.metadata for name, sign in SIGNS.items()]
    bounds = [f"{sign} {limit}" for sign, limit in limits if limit is not None]
    return [", ".join(bounds)] if bounds else []


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    if info.default is None:
        return "left out"
    return f"`{info.default if isinstance(info.default, str) else json.dumps(info.default)}`"


if __name__ == "__main__":
    print(reference(), end="")
