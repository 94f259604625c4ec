"""What a run consists of, settled from config, data and the target's config before a weight is loaded."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from draftmill.config import RunConfig, dump_yaml
from draftmill.data.plan import BatchPlan
from draftmill.data.prepared import PreparedSet
from draftmill.data.tokenizer import load_tokenizer
from draftmill.drafter.config import DrafterSpec
from draftmill.drafter.model import Drafter
from draftmill.errors import UserError
from draftmill.run.console import say
from draftmill.run.job import check_fp8, plain_because
from draftmill.run.placement import Placement, default_slots, settle
from draftmill.run.resolve import check_tokenizer, resolve_mask_token, resolve_spec
from draftmill.run.split import explain, measure, share_out
from draftmill.target.shape import load_config, read_shape


@dataclass(frozen=True, slots=True)
class Built:
    """mask_origin: where the mask token comes from. total_steps: optimizer steps of the whole schedule. slots: for each
    drafter rank."""

    prepared: PreparedSet
    plan: BatchPlan
    tokenizer: Any
    spec: DrafterSpec
    mask_origin: str
    placement: Placement
    slots: int
    total_steps: int

    @property
    def width(self) -> int:
        """Features per token: taps × hidden size."""
        return len(self.spec.taps) * self.spec.hidden_size


def build(config: RunConfig) -> Built:
    """Open the data, read the target's config and tokenizer, settle the drafter; UserError for what cannot be."""
    placement = settle(config.devices, config.train.accumulation)  # what the config gets wrong comes first
    prepared = PreparedSet.open(config.data.prepared)
    shape = read_shape(load_config(config.target.model, trust_remote_code=config.target.trust_remote_code))
    tokenizer = load_tokenizer(config.target.model)
    check_tokenizer(prepared, tokenizer, config.target.model)
    mask_token_id, origin = resolve_mask_token(config.drafter.mask_token_id, tokenizer, shape.vocab_size, prepared)
    spec = resolve_spec(config.drafter, shape, mask_token_id)
    plan = BatchPlan(prepared, config.data.token_budget, config.seed)
    steps = max(1, config.train.epochs * plan.batches_per_epoch // config.train.accumulation)
    total = min(steps, config.train.max_steps or steps)
    placement = placement or _measured_placement(config, spec)
    check_kernels(config, spec, placement)
    if config.parallel == "fsdp" and placement.ranks == 1:
        raise UserError(
            "parallel: fsdp spreads the drafter over several ranks, but there is only one; name more devices"
        )
    slots = 1 if placement.inline else config.handoff.slots or default_slots(placement)
    return Built(prepared, plan, tokenizer, spec, origin, placement, slots, total)


def check_kernels(config: RunConfig, spec: DrafterSpec, placement: Placement) -> None:
    """Say it where a GPU would compute the slow step although the fast one was asked for. UserError where what was
    asked for is not possible."""
    check_fp8(config, spec, placement.drafters[0])
    if not placement.drafters[0].startswith("cuda") or config.train.kernels == "plain":
        return
    if reason := plain_because(config, spec):
        say(
            f"warning: {reason}; the drafter's step runs plain, several times slower (train.kernels=plain accepts this)"
        )
    elif importlib.util.find_spec("triton") is None:
        raise UserError(
            "train.kernels: fused needs triton, which comes with CUDA builds of torch; install it, or accept a step "
            "several times slower with train.kernels=plain"
        )


def _measured_placement(config: RunConfig, spec: DrafterSpec) -> Placement:
    devices = tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    say(f"devices: auto measures target and drafter on {devices[0]} …")
    measured = measure(config, spec, devices[0])
    choice = share_out(devices, measured, config.train.accumulation)
    for line in explain(choice, measured):
        say(line)
    return choice.placement


def identity(config: RunConfig, built: Built) -> dict[str, Any]:
    """What makes it this run and no other, beside the spec and the target's weights; stored in every checkpoint."""
    return {
        "target_dtype": config.target.dtype,
        "data_fingerprint": built.prepared.info.fingerprint,
        "template_kwargs": built.prepared.info.template_kwargs,
        "seed": config.seed,
        "token_budget": config.data.token_budget,
        "anchors": config.anchors,
        "accumulation": config.train.accumulation,
        "optimizer": config.train.optimizer,
    }


def announce(config: RunConfig, built: Built) -> None:
    """The resolved config on stdout, what follows from it on stderr."""
    spec, plan = built.spec, built.plan
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Drafter(spec).parameters())
    slot = config.data.token_budget * built.width * getattr(torch, config.target.dtype).itemsize
    print(dump_yaml(config), end="", flush=True)
    say(f"mask token: {spec.mask_token_id} ({built.mask_origin})")
    say(
        f"drafter: {spec.layers} layers, block {spec.block_size}, taps {list(spec.taps)}, "
        f"{parameters / 1e6:.1f} M parameters"
    )
    say(
        f"data: {len(built.prepared):,} documents in {plan.batches_per_epoch:,} batches of {plan.token_budget:,} "
        f"tokens, {plan.padding_share:.1%} padding, {plan.cut_documents:,} cut, {plan.left_out_documents:,} left out"
    )
    say(f"schedule: {built.total_steps:,} steps of {config.train.accumulation} × {config.anchors} anchors")
    total = built.slots * built.placement.ranks
    say(
        f"devices: {built.placement.describe()}; hidden states: {total} slot{'s' if total != 1 else ''} × "
        f"{slot / 1e6:.1f} MB = {total * slot / 1e9:.2f} GB"
    )


def choose_device(wanted: str) -> str:
    available = torch.cuda.is_available()
    if wanted not in ("auto", "cpu", "cuda"):
        raise UserError(f"device: {wanted!r} is none of auto, cpu, cuda")
    if wanted == "cuda" and not available:
        raise UserError("device: cuda, but torch sees no CUDA device; use device=cpu or install a CUDA build of torch")
    return "cuda" if available and wanted != "cpu" else "cpu"
