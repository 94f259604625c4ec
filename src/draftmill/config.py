"""The configuration of a run: one YAML file, `key=value` overrides, nothing unknown accepted."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from draftmill.data.config import DataConfig
from draftmill.drafter.config import DrafterConfig
from draftmill.errors import UserError
from draftmill.handoff.config import HandoffConfig
from draftmill.target.config import TargetConfig
from draftmill.train.config import TrainConfig

Devices = tuple[str, ...]


class DevicesConfig(BaseModel):
    """Which devices do what: one process each. Lists as [0, 1, 2] (CUDA devices), cuda:1, cpu, or cpu*2 (two processes
    on the CPU). All left out, or `devices: auto`: chosen by what the host has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    targets: Devices | None = Field(None, description="Devices that run the target. Goes with `drafters`.")
    drafters: Devices | None = Field(None, description="Devices that train the drafter, one rank each.")
    inline: Devices | None = Field(
        None, description="Devices that do both in turn, each with its share of the batches. Not with the two others."
    )

    @field_validator("targets", "drafters", "inline", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        if value is None:
            return None
        names = [name for item in (value if isinstance(value, list | tuple) else [value]) for name in _devices(item)]
        twice = next((name for name in names if name != "cpu" and names.count(name) > 1), None)
        if not names or twice:
            raise ValueError(f"{twice} is listed twice" if twice else "at least one device is needed")
        return tuple(names)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.inline is not None and (self.targets or self.drafters):
            raise ValueError("devices.inline means that each device does both; leave devices.targets and drafters out")
        if (self.targets is None) != (self.drafters is None):
            missing = "drafters" if self.drafters is None else "targets"
            raise ValueError(f"devices.{missing} is missing: a split needs both devices.targets and devices.drafters")
        return self


def _devices(item: Any) -> list[str]:
    """0 → cuda:0, "cpu*2" → cpu, cpu."""
    name, times, count = str(item).partition("*")
    name = f"cuda:{name}" if name.isdecimal() else name.strip()
    index = name.removeprefix("cuda:")
    if isinstance(item, bool) or (times and not count.strip().isdecimal()):
        raise ValueError("not a device; write 0 or cuda:0, cpu, or cpu*2")
    if name != "cpu" and not (name.startswith("cuda:") and index.isdecimal()):
        raise ValueError(f"{name!r} is not a device; write 0 or cuda:0, cpu, or cpu*2")
    return [name] * (int(count) if times else 1)


class WandbConfig(BaseModel):
    """Weights & Biases. Its environment variables hold too: WANDB_MODE, WANDB_API_KEY, WANDB_BASE_URL and others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    project: str | None = Field(
        None,
        min_length=1,
        description="wandb project that the run is copied to while it goes. Needs `pip install 'draftmill[wandb]'`. "
        "Left out: nothing is sent. See [tracking.md](tracking.md).",
    )
    entity: str | None = Field(None, description="User or team that owns the project. Left out: wandb's own default.")
    name: str | None = Field(None, description="Name of the run there. Left out: that of the run's folder.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.project is None and (self.entity or self.name):
            raise ValueError("tracking.wandb without a project sends nothing; name one: tracking.wandb.project=NAME")
        return self


class TrackingConfig(BaseModel):
    """Who else is told how the run goes. The run's own files and TensorBoard's are always written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wandb: WandbConfig = Field(default_factory=WandbConfig)  # type: ignore[arg-type]
    prometheus_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port on which Prometheus gets the numbers of `draftmill status` while the run goes. Needs "
        "`pip install 'draftmill[prometheus]'`. Left out: none.",
    )
    prometheus_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address on which that port is open. The default answers this machine only; 0.0.0.0 answers "
        "everybody who can reach it, without a password.",
    )


class RunConfig(BaseModel):
    """Everything about a run. Paths are relative to the folder the command is given in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_dir: Path = Field(description="Folder of the run: config, metrics, checkpoints, status. One run per folder.")
    seed: int = Field(
        0, ge=0, description="Seeds initial weights, packing, order and anchors. Same seed, same drafter."
    )
    devices: DevicesConfig = Field(default_factory=DevicesConfig)  # type: ignore[arg-type]
    handoff: HandoffConfig = Field(default_factory=HandoffConfig)  # type: ignore[arg-type]
    parallel: Literal["data", "fsdp"] = Field(
        "data",
        description="How several drafter ranks share the work. data: each holds the whole drafter; fsdp: each holds a "
        "part of weights and optimizer, for drafters that do not fit one device.",
    )
    cache: Path | None = Field(
        None,
        description="Folder for hidden states on disk: epochs and runs after the first read them instead of running "
        "the target, and when all are there no target is loaded. Left out: nothing is kept on disk.",
    )
    cache_gb: float | None = Field(
        None, gt=0, description="The cache holds at most so many GB (10^9 bytes). Left out: all states of an epoch."
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of each process. Left out: OMP_NUM_THREADS, or the cores divided by the processes. "
        "Results are the same bit for bit only with the same number.",
    )
    decode_check_prompts: int = Field(
        4,
        ge=0,
        description="At the end of a run this many prompts of the training set are decoded for real and compared, "
        "block by block, with what training measures. 0 leaves the check out.",
    )
    data: DataConfig
    target: TargetConfig
    drafter: DrafterConfig = Field(default_factory=DrafterConfig)  # type: ignore[arg-type]
    train: TrainConfig = Field(default_factory=TrainConfig)  # type: ignore[arg-type]
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)  # type: ignore[arg-type]

    @property
    def anchors(self) -> int:
        """N: anchors per batch, 512 per 4096 tokens unless set."""
        return self.train.anchors or max(1, self.data.token_budget // 8)

    @field_validator("devices", mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        """`devices: auto`, `devices: cpu` and `devices: cuda` as short forms."""
        if isinstance(value, str):
            return {} if value == "auto" else {"inline": ["cuda:0" if value == "cuda" else value]}
        return value

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.cache_gb is not None and self.cache is None:
            raise ValueError("cache_gb without cache keeps nothing; name a folder: cache=DIR")
        if self.parallel == "fsdp" and self.train.optimizer == "muon":
            raise ValueError("train.optimizer: muon needs whole matrices, parallel: fsdp spreads them; choose one")
        if self.anchors > self.data.token_budget:
            raise ValueError(
                f"train.anchors ({self.anchors}) is more than data.token_budget ({self.data.token_budget}); "
                "a batch cannot have more anchors than tokens"
            )
        return self


class _UniqueKeys(yaml.SafeLoader):
    """YAML itself lets the last of two equal keys win, silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise UserError(f"line {key_node.start_mark.line + 1}: {key} is given twice; keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def load_run_config(path: Path, overrides: list[str]) -> RunConfig:
    """Read YAML, apply `a.b=value` overrides (values are YAML), validate. Raises UserError naming file and key."""
    values = read_yaml(path)
    for override in overrides:
        _apply(values, override)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error, RunConfig)}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(), _UniqueKeys)
    except FileNotFoundError as error:
        raise UserError(
            f"{path} does not exist; give the path of a run config, for example configs/quickstart.yaml"
        ) from error
    except UserError as error:
        raise UserError(f"{path}, {error}") from error
    except (yaml.YAMLError, IsADirectoryError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold keys and values, for example `run_dir: runs/mine`")
    return values


def dump_yaml(config: RunConfig) -> str:
    """The resolved config, every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise UserError(f"override {override!r} is not of the form key=value, for example train.lr=3e-4")
    *parents, last = name.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise UserError(f"override {override!r}: {parent} is a single value, it has no keys below it")
    values[last] = yaml.safe_load(text)


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """All faults of a validation in one line, each with its full key and, for an unknown key, the nearest known one."""
    return "; ".join(_explain_one(item, model) for item in error.errors())


def _explain_one(item: Any, model: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = known_keys(model)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.4) or _same_leaf(key, known)
        hint = f"; did you mean {near[0]}?" if near else f"; known keys: {', '.join(known)}"
        return f"unknown key {key}{hint}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "missing":
        return f"{key} is missing"
    given = "" if isinstance(item["input"], dict) else f" (got {item['input']!r})"
    return f"{key + ': ' if key else ''}{message}{given}"


def _same_leaf(key: str, known: list[str]) -> list[str]:
    leaf = key.rsplit(".", 1)[-1]
    leaves = {k.rsplit(".", 1)[-1]: k for k in known}
    return [leaves[hit] for hit in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.6)]


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted keys of a config model."""
    keys = []
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += known_keys(inner, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys
