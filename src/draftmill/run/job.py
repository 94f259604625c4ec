"""What workers are told at their start, and what a run does the same way in whichever process it happens."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftmill.config import RunConfig
from draftmill.data.plan import BatchPlan
from draftmill.data.prepared import PreparedSet
from draftmill.drafter.config import DrafterSpec
from draftmill.drafter.model import Drafter, initialise
from draftmill.errors import UserError
from draftmill.run.decode_check import decode_check, describe
from draftmill.run.messages import Checked
from draftmill.run.resolve import resolve_gamma
from draftmill.target.capture import Target
from draftmill.train.checkpoint import Checkpoint, load_drafter
from draftmill.train.step import StepSettings

FUSED_HEAD_DIMS = (64, 128)
FP8_CAPABILITY = (8, 9)  # of a GPU that multiplies 8-bit floats
NO_TARGET_TO_CHECK = (
    "decode check: left out, because all states came from the cache and no target was loaded; "
    "`draftmill evaluate` decodes"
)


@dataclass(frozen=True, slots=True)
class Job:
    """What every worker is told at its start. threads: CPU threads it may use. batches: first and end of the run's."""

    name: str
    config: RunConfig
    spec: DrafterSpec
    device: str
    threads: int
    batches: tuple[int, int]

    def prepare_process(self) -> BatchPlan:
        """Threads and device for this process alone; returns the plan of batches, which is the same in every worker."""
        own = Path(tempfile.gettempdir()) / f"draftmill-compiled-{os.getuid()}" / self.name
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(own))  # kept between runs, shared with no other worker
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(self.threads))
        torch.set_num_threads(self.threads)
        if self.device.startswith("cuda"):
            torch.cuda.set_device(self.device)
        prepared = PreparedSet.open(self.config.data.prepared)
        return BatchPlan(prepared, self.config.data.token_budget, self.config.seed)


def step_settings(config: RunConfig, spec: DrafterSpec, device: str) -> StepSettings:
    fused = device.startswith("cuda") and config.train.kernels == "fused" and plain_because(config, spec) is None
    check_fp8(config, spec, device)
    if config.train.fp8 != "none" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise UserError(_no_fp8(config, device))
    return StepSettings(
        anchors=config.anchors,
        gamma=resolve_gamma(config.train.gamma, spec.block_size),
        seed=config.seed,
        dtype=getattr(torch, config.train.dtype),
        fused_rows=config.data.token_budget if fused else None,
        fp8=config.train.fp8,
    )


def check_fp8(config: RunConfig, spec: DrafterSpec, device: str) -> None:
    """UserError if train.fp8 asks for what no device can do, or no CPU. Touches no GPU."""
    if config.train.fp8 == "none":
        return
    if not device.startswith("cuda"):
        raise UserError(_no_fp8(config, device))
    sizes = {"hidden size": spec.hidden_size, "vocabulary": spec.vocab_size}
    if config.train.fp8 == "all":
        sizes["intermediate size"] = spec.intermediate_size
    reasons = [f"the {name} is {size}, no multiple of 16" for name, size in sizes.items() if size % 16]
    if config.train.kernels == "plain":
        reasons.append("train.kernels is plain")
    elif reason := plain_because(config, spec):
        reasons.append(reason)
    if not hasattr(torch, "_scaled_mm"):
        reasons.append(f"torch {torch.__version__} has no torch._scaled_mm")
    if reasons:
        raise UserError(f"train.fp8: {config.train.fp8} is not possible: {'; '.join(reasons)}; leave it out")


def _no_fp8(config: RunConfig, device: str) -> str:
    return (
        f"train.fp8: {config.train.fp8} needs a GPU with 8-bit products (compute capability 8.9 or higher), which "
        f"{device} is not; leave it out"
    )


def plain_because(config: RunConfig, spec: DrafterSpec) -> str | None:
    """Why a GPU cannot compute the fused step, or None."""
    if config.train.dtype != "bfloat16":
        return f"train.dtype is {config.train.dtype}, the fused kernels are for bfloat16"
    if spec.head_dim not in FUSED_HEAD_DIMS:
        return f"the drafter's heads have {spec.head_dim} numbers, the fused kernels are for {FUSED_HEAD_DIMS}"
    if config.parallel == "fsdp":
        return "parallel: fsdp spreads matrices that the fused step needs whole"
    return None


def starting_drafter(checkpoint: Checkpoint | None, spec: DrafterSpec, seed: int, device: str) -> Drafter:
    """Weights of the checkpoint, or the seed's: the same in every process."""
    if checkpoint is not None:
        return load_drafter(checkpoint).to(device)
    drafter = Drafter(spec)
    initialise(drafter, seed)
    return drafter.to(device)


def check_by_decoding(
    target: Target | None, drafter: Drafter, prepared: PreparedSet, tokenizer: Any, prompts: int
) -> Checked:
    """A short real decode: does decoding accept what training promises? Both models on one device."""
    if target is None:
        return Checked(None, NO_TARGET_TO_CHECK)
    result = decode_check(target, drafter, prepared, tokenizer, prompts)
    return Checked(None if result is None else result.to_dict(), describe(result))
