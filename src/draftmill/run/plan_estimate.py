"""What a run would take on GPUs that need not be here: seconds of either side and memory of each kind of GPU.

Legend: T tokens of a batch, N anchors, K taps, H hidden size; a slot holds the states of one batch, [T, K·H].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from draftmill.config import RunConfig
from draftmill.data.plan import BatchPlan
from draftmill.data.prepared import PreparedSet
from draftmill.data.tokenizer import load_tokenizer
from draftmill.drafter.config import DrafterSpec
from draftmill.drafter.memory import PLAIN_BYTES, Memory, fewest_groups, parameters
from draftmill.handoff.copies import BUFFERS
from draftmill.run import plan_devices as cost
from draftmill.run.job import plain_because
from draftmill.run.placement import Placement, default_slots
from draftmill.run.resolve import check_tokenizer, resolve_mask_token, resolve_spec
from draftmill.run.split import Measured
from draftmill.target.shape import load_config, read_shape

CONTEXT_BYTES = int(0.7e9)  # of a GPU: CUDA's own, and compiled kernels


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """One kind of GPU of a run. parts: name → bytes. groups: of blocks in the drafter's step; None: no group, however
    small, fits, or no fused step runs here. fits: with the rules of a run, on a GPU of limit_bytes."""

    role: str
    parts: dict[str, int]
    total_bytes: int
    limit_bytes: int
    groups: int | None
    fits: bool


@dataclass(frozen=True, slots=True)
class Split:
    """A use of the GPUs. targets: 0 where each drafter rank runs the target too. bound: by which side."""

    targets: int
    ranks: int
    idle: int
    tokens_per_second: float
    bound: str
    fits: bool

    def describe(self) -> str:
        if not self.targets:
            return f"{self.ranks} × inline"
        return f"{self.targets} target{'s' * (self.targets > 1)} : {self.ranks} drafter{'s' * (self.ranks > 1)}"


class Estimator:
    """What is known of the run, and the estimates that follow. measured: seconds to take in their place."""

    measured: Measured | None = None

    def __init__(self, config: RunConfig, device: cost.Device, gpus: int) -> None:
        self.config, self.device, self.gpus = config, device, gpus
        prepared = PreparedSet.open(config.data.prepared)
        target = load_config(config.target.model, trust_remote_code=config.target.trust_remote_code)
        shape, tokenizer = read_shape(target), load_tokenizer(config.target.model)
        check_tokenizer(prepared, tokenizer, config.target.model)
        mask, _ = resolve_mask_token(config.drafter.mask_token_id, tokenizer, shape.vocab_size, prepared)
        self.spec: DrafterSpec = resolve_spec(config.drafter, shape, mask)
        self.batches = BatchPlan(prepared, config.data.token_budget, config.seed)
        self.sample = cost.take_sample(self.batches)
        self.target = cost.target_cost(target, self.spec.taps[-1], trust_remote_code=config.target.trust_remote_code)
        self.packed = config.target.isolation != "rows" and not self.target.recurrent
        plain = config.train.kernels == "plain"
        self.plain = "train.kernels is plain" if plain else plain_because(config, self.spec)
        itemsize: int = getattr(torch, config.target.dtype).itemsize
        self.target_bytes = self.target.parameters * itemsize
        self.slot_bytes = self.batches.token_budget * len(self.spec.taps) * self.spec.hidden_size * itemsize
        self.epoch_bytes = round(self.slot_bytes * self.batches.batches_per_epoch * (1 - self.batches.padding_share))
        self.matrices = (1 if self.target.tied else 2) * self.spec.vocab_size * self.spec.hidden_size * itemsize
        steps = max(1, config.train.epochs * self.batches.batches_per_epoch // config.train.accumulation)
        self.steps = min(steps, config.train.max_steps or steps)

    # --- seconds ------------------------------------------------------------------------------------------------------

    @cached_property
    def target_seconds(self) -> float:
        if self.measured is not None:
            return self.measured.target_seconds
        return cost.target_seconds(self.target, self.device, self.sample, packed=self.packed)

    @cached_property
    def step_seconds(self) -> float:
        """The drafter's micro-step; a measured one has an update in it."""
        if self.measured is not None:
            return self.measured.drafter_seconds
        tokens, anchors = self.batches.token_budget, self.config.anchors
        fused = cost.drafter_seconds(self.spec, self.device, tokens, anchors, self.sample, self.config.train.fp8)
        return max(fused, cost.plain_seconds(self.spec, self.sample)) if self.plain else fused

    @cached_property
    def update_seconds(self) -> float:
        if self.measured is not None:
            return 0.0
        return cost.update_seconds(self.spec, self.device, self.config.train.optimizer)

    def drafter_seconds(self, ranks: int) -> float:
        """A batch on one of the ranks, with its share of the update."""
        update = self.update_seconds + cost.gradient_sum_seconds(self.spec, self.device, ranks)
        return self.step_seconds + update * ranks / self.config.train.accumulation

    def rate(self, targets: int, ranks: int, kept: float = 0.0) -> tuple[float, str]:
        """(batches a second, the side that bounds them). kept: share of the batches whose states are there already."""
        target, drafter = self.target_seconds * (1 - kept), self.drafter_seconds(ranks)
        if not targets:
            return ranks / (target + drafter), "both in turn"
        if target / targets > drafter / ranks:
            return targets / target, "targets"
        return ranks / drafter, "drafters"

    def kept_share(self, targets: int, ranks: int) -> float:
        """Of an epoch's batches, those that later epochs read instead of running the target."""
        bins, config = self.batches.batches_per_epoch, self.config
        reused = min(1.0, config.target.reuse_states_gb * 1e9 / self.epoch_bytes) if targets + ranks == 1 else 0.0
        return max(reused, self._cached_bins() / bins)

    def _cached_bins(self) -> int:
        bins, config = self.batches.batches_per_epoch, self.config
        if config.cache is None:
            return 0
        return bins if config.cache_gb is None else min(bins, int(config.cache_gb * 1e9 // self.slot_bytes))

    def split(self, targets: int, ranks: int) -> Split:
        rate, bound = self.rate(targets, ranks)
        fits = all(gpu.fits for gpu in self.memory(targets, ranks))
        return Split(targets, ranks, self.gpus - targets - ranks, rate * self.sample_tokens, bound, fits)

    @property
    def sample_tokens(self) -> float:
        """Tokens of a batch without its padding; of all batches, not of the sample."""
        return self.batches.token_budget * (1 - self.batches.padding_share)

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def limit(self) -> int:
        return int(self.device.gb * 1e9)

    @property
    def direct(self) -> bool:
        """Whether slots lie in the drafters' GPUs."""
        return self.config.handoff.queue != "host" and self.device.peer_gbs > 0

    def slots(self, targets: int, ranks: int) -> int:
        """For each rank."""
        placement = Placement(tuple("t" * targets), tuple("d" * ranks))
        return 1 if not targets else self.config.handoff.slots or default_slots(placement)

    def memory(self, targets: int, ranks: int) -> list[GpuMemory]:
        """None where CPUs do the work: they share the host's."""
        if self.device.name == "cpu":
            return []
        running = {
            "target": self.target_bytes,
            "forward pass": self._forward_bytes(),
            "reused states": self._reused_bytes(targets or ranks),
        }
        if not targets:
            beside = self.target_bytes - self.matrices + self.slot_bytes
            parts, groups = self._step(beside, ranks)
            parts["embedding and head"] = 0  # the target's own
            return [self._gpu("inline", {**running, "batch": self.slot_bytes, **parts}, groups)]
        slots = self.slots(targets, ranks) if self.direct else BUFFERS
        parts, groups = self._step(slots * self.slot_bytes, ranks)
        held = {"slots" if self.direct else "buffers": slots * self.slot_bytes}
        return [
            self._gpu("target", {**running, "buffers": BUFFERS * self.slot_bytes}, groups=1),
            self._gpu("drafter", {**parts, **held}, groups),
        ]

    def _gpu(self, role: str, parts: dict[str, int], groups: int | None) -> GpuMemory:
        parts = {name: size for name, size in {**parts, "CUDA": CONTEXT_BYTES}.items() if size}
        total = sum(parts.values())
        fused = role != "target" and not self.plain
        fits = total <= self.limit and groups is not None
        return GpuMemory(role, parts, total, self.limit, groups if fused else None, fits)

    def _step(self, beside: int, ranks: int) -> tuple[dict[str, int], int | None]:
        """(parts of a drafter's step, groups): as few groups as a run would take, None where even N do not fit. The
        plain step has none; 1 stands for it."""
        spec, config = self.spec, self.config
        if self.plain:
            weights = PLAIN_BYTES * parameters(spec) // (ranks if config.parallel == "fsdp" else 1)
            return {"weights": weights, "embedding and head": self.matrices}, 1
        groups, memory = fewest_groups(
            spec,
            self.limit - CONTEXT_BYTES - beside,
            context_rows=config.data.token_budget,
            anchors=config.anchors,
            tied=self.target.tied,
            fp8=config.train.fp8,
        )
        return _parts(memory, self.slot_bytes), groups

    def _forward_bytes(self) -> int:
        """What all matrices of the widest layer put out, the MLP's product and four numbers a hidden unit; or, when the
        states are checked, a copy of them."""
        rows = [passes for batch in self.sample.as_run(packed=self.packed) for passes in batch]
        tokens = self.batches.token_budget if self.packed else max(count * length for count, length in rows)
        per_token = self.target.width + self.spec.intermediate_size + 4 * self.spec.hidden_size
        itemsize: int = getattr(torch, self.config.target.dtype).itemsize
        return max(tokens * per_token * itemsize, self.slot_bytes)

    def _reused_bytes(self, processes: int) -> int:
        wanted = round(self.config.target.reuse_states_gb * 1e9 / processes)
        return min(wanted, self.epoch_bytes)


def _parts(memory: Memory, slot_bytes: int) -> dict[str, int]:
    """The batch itself lies in a slot or buffer, which is listed apart."""
    parts = {
        "weights": memory.weights,
        "embedding and head": memory.matrices,
        "states": memory.features - slot_bytes,
        "context": memory.context,
        "blocks": memory.blocks,
    }
    return {**parts, "allocator": memory.total - sum(parts.values()) - slot_bytes}
