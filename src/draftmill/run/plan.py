"""The plan command: what a run would cost on GPUs that need not be here, from config, data and the target's config.

Every number is an estimate, and `Plan.assumptions` says what it rests on. GB = 10^9 bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from draftmill.config import RunConfig
from draftmill.drafter.memory import HEADROOM, checkpoint_bytes, parameters
from draftmill.errors import UserError
from draftmill.run import plan_devices as cost
from draftmill.run.placement import Placement, available_memory, check_ranks
from draftmill.run.plan_estimate import CONTEXT_BYTES, Estimator, GpuMemory, Split
from draftmill.run.split import Measured, measure, share_out

BETTER = 1.05  # a split that is so much faster is worth a line
BUSY_LINK = 0.5  # of the data sheet's rate: what is more may not be reached


@dataclass(frozen=True, slots=True)
class Plan:
    """Plain values; docs/plan.md explains each. problems: why the run cannot work as planned, with the remedy."""

    device: dict[str, Any]
    data: dict[str, Any]
    schedule: dict[str, Any]
    drafter: dict[str, Any]
    target: dict[str, Any]
    seconds: dict[str, float]
    chosen: Split
    options: list[Split]
    waits: dict[str, float | None]
    time: dict[str, float]
    memory: list[GpuMemory]
    host: dict[str, int]
    queue: dict[str, Any] | None
    disk: dict[str, Any]
    warm_up: dict[str, float]
    problems: list[str]
    notes: list[str]
    assumptions: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_plan(config: RunConfig, device: str, gpus: int | None = None, *, measured: bool = False) -> Plan:
    """device: one of `plan_devices.DEVICES`. gpus: how many; left out: those the config names, or one. measured: on
    this machine's first GPU, or its CPU where there is none.

    UserError for a config that `train` refuses, and for what cannot be estimated or measured.
    """
    found = cost.find_device(device)
    if measured:
        where, here = cost.this_machine(found, available_memory())
        named = _named(config, gpus, cpu=where == "cpu")
        planner = _Planner(config, here, named.processes if named else gpus or 1, named)
        planner.measure(where)
        return planner.plan()
    named = _named(config, gpus, cpu=False)
    for key, dtype in (("train.dtype", config.train.dtype), ("target.dtype", config.target.dtype)):
        if dtype == "float32":
            raise UserError(f"{key}: float32 cannot be planned, only rates of 16-bit products are known; use bfloat16")
    return _Planner(config, found, named.processes if named else gpus or 1, named).plan()


def _named(config: RunConfig, gpus: int | None, *, cpu: bool) -> Placement | None:
    """The placement that the config names, checked as far as it can be without the GPUs. cpu: all are to be CPUs."""
    devices = config.devices
    if gpus is not None and gpus < 1:
        raise UserError(f"--gpus {gpus}: at least one is needed")
    if devices.inline is None and devices.targets is None:
        return None
    named = check_ranks(
        Placement(devices.targets or (), devices.inline or devices.drafters or ()), config.train.accumulation
    )
    each = [*named.targets, *named.drafters]
    if cpu and set(each) != {"cpu"}:
        raise UserError("--measure: this machine has no GPU, but devices names some; leave one of them out")
    if not cpu and "cpu" in each:
        raise UserError(
            "devices: cpu, but a plan is for GPUs; plan with devices=auto, and --gpus for their number. On a machine "
            "without GPUs --measure plans for its CPU"
        )
    if not cpu and len(set(each)) < len(each):
        raise UserError("devices: a GPU is among targets and drafters; a plan is for one process a GPU, or inline")
    if gpus not in (None, len(each)):
        raise UserError(f"--gpus {gpus}, but devices names {len(each)}; leave one out (devices=auto)")
    return named


class _Planner(Estimator):
    def __init__(self, config: RunConfig, device: cost.Device, gpus: int, named: Placement | None) -> None:
        super().__init__(config, device, gpus)
        self.named = named
        self.measured_on: str | None = None

    def measure(self, where: str) -> None:
        """Take seconds measured on a device that is here."""
        if where == "cpu":
            self.plain = "a CPU computes no other"
        self.measured, self.measured_on = measure(self.config, self.spec, where), where

    # --- the whole ----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        chosen, options = self._choose()
        memory = self.memory(chosen.targets, chosen.ranks)
        time, waits = self._time(chosen), self._waits(chosen)
        queue = self._queue(chosen) if chosen.targets else None
        return Plan(
            device={**asdict(self.device), "gpus": self.gpus, "origin": self.device.origin,
                    "measured_on": self.measured_on},
            data=self._data(),
            schedule={"steps": self.steps, "batches": self.steps * self.config.train.accumulation,
                      "accumulation": self.config.train.accumulation, "anchors": self.config.anchors},
            drafter={"parameters": parameters(self.spec), "layers": self.spec.layers,
                     "block_size": self.spec.block_size, "taps": list(self.spec.taps),
                     "step": f"plain: {self.plain}" if self.plain else "fused"},
            target={"parameters": self.target.parameters, "active_parameters": self.target.active,
                    "layers_run": self.target.layers, "isolation": "packed" if self.packed else "rows"},
            seconds={"target_batch": self.target_seconds, "drafter_batch": self.drafter_seconds(chosen.ranks),
                     "drafter_step": self.step_seconds, "update": self.update_seconds,
                     "gradient_sum": cost.gradient_sum_seconds(self.spec, self.device, chosen.ranks)},
            chosen=chosen, options=options, waits=waits, time=time, memory=memory, host=self._host(chosen), queue=queue,
            disk=self._disk(), warm_up=dict(cost.FIRST_STEP_SECONDS), problems=self._impossible(chosen, memory),
            notes=self._notes(chosen, options, time, queue), assumptions=self._assumptions(),
        )  # fmt: skip

    def _choose(self) -> tuple[Split, list[Split]]:
        """What the config names, or what `devices: auto` would take; and, for auto, all that is possible."""
        if self.named is not None:
            chosen = self.split(len(self.named.targets), self.named.ranks)
            return chosen, [chosen]
        allowed = [ranks for ranks in range(self.gpus, 0, -1) if self.config.train.accumulation % ranks == 0]
        options = [self.split(0, ranks) for ranks in allowed]
        together = options[0].fits if self.measured is None else self.measured.together
        options += [self.split(self.gpus - ranks, ranks) for ranks in allowed if ranks < self.gpus]
        if self.gpus == 1:
            return options[0], options
        measured = Measured(self.target_seconds, self.step_seconds + self.update_seconds, together)
        taken = share_out(tuple(map(str, range(self.gpus))), measured, self.config.train.accumulation).placement
        chosen = next(one for one in options if (one.targets, one.ranks) == (len(taken.targets), taken.ranks))
        return chosen, options

    def _data(self) -> dict[str, Any]:
        batches, info = self.batches, self.batches.prepared.info
        return {
            "documents": info.documents, "tokens": info.tokens, "trained_tokens": info.trained_tokens,
            "cut_documents": batches.cut_documents, "left_out_documents": batches.left_out_documents,
            "token_budget": batches.token_budget, "batches_per_epoch": batches.batches_per_epoch,
            "tokens_per_epoch": round(self.sample_tokens * batches.batches_per_epoch),
            "padding_share": batches.padding_share, "documents_per_batch": self.sample.documents,
            "places_per_batch": self.sample.valid,
        }  # fmt: skip

    def _time(self, split: Split) -> dict[str, float]:
        """Hours. An epoch after the first may find states kept."""
        first = self.rate(split.targets, split.ranks)[0]
        later = self.rate(split.targets, split.ranks, self.kept_share(split.targets, split.ranks))[0]
        epoch, total = self.batches.batches_per_epoch, self.steps * self.config.train.accumulation
        hours = (min(epoch, total) / first + max(0, total - epoch) / later) / 3600
        return {
            "first_epoch_hours": epoch / first / 3600, "later_epoch_hours": epoch / later / 3600,
            "total_hours": hours, "gpu_hours": hours * self.gpus,
            "tokens_per_second": first * self.sample_tokens, "later_tokens_per_second": later * self.sample_tokens,
        }  # fmt: skip

    def _waits(self, split: Split) -> dict[str, float | None]:
        """Share of the time, in the first epoch, that each side waits for the other."""
        if not split.targets:
            return {"targets_wait": None, "drafters_wait": None}
        rate, _ = self.rate(split.targets, split.ranks)
        return {
            "targets_wait": max(0.0, 1 - rate * self.target_seconds / split.targets),
            "drafters_wait": max(0.0, 1 - rate * self.drafter_seconds(split.ranks) / split.ranks),
        }

    def _queue(self, split: Split) -> dict[str, Any]:
        rate, _ = self.rate(split.targets, split.ranks)
        link = self.device.peer_gbs if self.direct else self.device.host_gbs
        slots = self.slots(split.targets, split.ranks)
        needed = rate * self.slot_bytes / 1e9
        return {
            "where": "device" if self.direct else "host", "slots_per_rank": slots, "slot_bytes": self.slot_bytes,
            "bytes": slots * split.ranks * self.slot_bytes, "gb_per_second": needed,
            "gb_per_second_each_drafter": needed / split.ranks,
            "gb_per_second_each_target": needed / split.targets, "link_gb_per_second": link,
        }  # fmt: skip

    def _host(self, split: Split) -> dict[str, int]:
        """slots, matrices: shared by all processes, for the whole run. loading: while all targets load at once."""
        slots = split.ranks * self.slots(split.targets, split.ranks) * self.slot_bytes
        return {
            "slots": slots if split.targets and not self.direct else 0,
            "matrices": self.matrices if split.targets else 0,
            "loading": (split.targets or split.ranks) * self.target_bytes,
        }

    def _disk(self) -> dict[str, Any]:
        saved, keep = checkpoint_bytes(self.spec, self.config.train.optimizer), self.config.train.keep
        share = self._cached_bins() / self.batches.batches_per_epoch
        return {
            "checkpoint_bytes": saved, "checkpoints": min(keep, -(-self.steps // self.config.train.save_every)),
            "while_saving_bytes": (keep + 1) * saved,
            "cache_bytes": round(self.epoch_bytes * share) + (self.matrices if share else 0), "cache_share": share,
        }  # fmt: skip

    # --- in words -----------------------------------------------------------------------------------------------------

    def _impossible(self, split: Split, memory: list[GpuMemory]) -> list[str]:
        """What would end the run, with the remedy."""
        found = [self._too_large(gpu) for gpu in memory if not gpu.fits]
        if self.config.target.isolation == "packed" and self.target.recurrent:
            found.append("target.isolation: packed, but its recurrent layers leak between packed documents; use auto")
        if self.config.parallel == "fsdp" and split.ranks == 1:
            found.append(
                "parallel: fsdp spreads the drafter over several ranks, but there is only one; name more devices"
            )
        if split.targets and self.config.handoff.queue == "device" and not self.device.peer_gbs:
            found.append(f"handoff.queue: device, but {self.device.name}s have no link to each other; use host")
        return found

    def _too_large(self, gpu: GpuMemory) -> str:
        target = self.target_bytes if gpu.role == "inline" else 0
        base = target + gpu.parts.get("weights", 0) + gpu.parts.get("embedding and head", 0) + CONTEXT_BYTES
        remedy = "lower data.token_budget, which batch, context and forward pass follow, or use a larger GPU"
        if gpu.parts.get("reused states", 0) >= gpu.total_bytes - gpu.limit_bytes > 0:
            remedy = "lower target.reuse_states_gb"
        elif gpu.role == "target" and self.target_bytes + CONTEXT_BYTES > gpu.limit_bytes:
            remedy = "the target alone is too large for this GPU, and it is not spread over several; use a larger GPU"
        elif gpu.role == "inline" and self._split_fits():
            remedy = "give target and drafter GPUs of their own: more --gpus, or devices.targets and devices.drafters"
        elif base > gpu.limit_bytes:
            remedy = "lower drafter.layers or drafter.intermediate_size, try parallel=fsdp, or use a larger GPU"
        rule = ""
        if gpu.role != "target" and not self.plain:
            least = "" if gpu.groups else "even with one block at a time, "
            rule = f" ({least}and a step takes at most {HEADROOM:.0%} of what the rest leaves free)"
        return (
            f"{gpu.role} GPU: needs about {gpu.total_bytes / 1e9:.1f} GB{rule}; {self.device.name} has "
            f"{gpu.limit_bytes / 1e9:.1f}. Remedy: {remedy}"
        )

    def _split_fits(self) -> bool:
        return all(gpu.fits for gpu in self.memory(1, 1))

    def _notes(
        self, split: Split, options: list[Split], time: dict[str, float], queue: dict[str, Any] | None
    ) -> list[str]:
        config, accumulation = self.config, self.config.train.accumulation
        notes = []
        best = max((one for one in options if one.fits), key=lambda one: one.tokens_per_second, default=split)
        if self.named is None and best.tokens_per_second > BETTER * split.tokens_per_second:
            more = best.tokens_per_second / split.tokens_per_second - 1
            notes.append(
                f"{best.describe()} would be {more:.0%} faster than what devices: auto takes; name the devices"
            )
        if split.idle:
            notes.append(
                f"{split.idle} GPUs stay idle: train.accumulation={accumulation} lets {split.ranks} ranks share a step "
                f"evenly; train.accumulation={-(-accumulation // self.gpus) * self.gpus} would use all"
            )
        if config.anchors > self.sample.valid:
            notes.append(
                f"train.anchors={config.anchors}, but a batch has {self.sample.valid:,.0f} places for a block on "
                "average; the others are computed for nothing"
            )
        if self.plain:
            notes.append(f"the drafter's step is plain ({self.plain}): slow, and its activations are not in the memory")
        if queue is not None:
            each = max(queue["gb_per_second_each_drafter"], queue["gb_per_second_each_target"])
            if each > BUSY_LINK * queue["link_gb_per_second"]:
                notes.append(
                    f"the queue needs {each:.0f} GB/s at a GPU, over half of what its link has; it may bound the run"
                )
        limit = config.train.max_minutes
        if limit is not None and limit < 60 * time["total_hours"]:
            share = limit / (60 * time["total_hours"])
            notes.append(f"train.max_minutes={limit:g} ends the run after about {share:.0%} of its schedule")
        return notes

    def _assumptions(self) -> list[str]:
        lines = cost.assumptions(
            self.device, self.target, self.sample, packed=self.packed, auto=self.config.target.isolation == "auto",
            kept=self.config.cache is not None or self.config.target.reuse_states_gb > 0,
        )  # fmt: skip
        if self.measured is not None:
            estimated = cost.rates(self.device)
            lines = [self._measurement(), *[line for line in lines if line not in estimated]]
        if self.config.train.optimizer == "muon":
            lines.append(
                "muon: its products at the drafter's rate, not measured; memory as for AdamW, which is too much"
            )
        if self.config.train.fp8 != "none" and self.measured is None:
            lines.append(
                f"train.fp8: {self.config.train.fp8}: products in fp8 {cost.FP8_TIMES:g} times as fast as in bfloat16, "
                "as on an h200 at the 27B shape; a GPU below compute capability 8.9, such as an a100, refuses it"
            )
        return lines

    def _measurement(self) -> str:
        assert self.measured is not None
        fit = "both fit it together" if self.measured.together else "they do not fit it together"
        return (
            f"measured on {self.measured_on} ({self.device.name}), one process at work: target "
            f"{self.measured.target_seconds:.3g} s, drafter {self.measured.drafter_seconds:.3g} s a batch, with an "
            f"update at each, which comes once in {self.config.train.accumulation} batches; {fit}. Sums of gradients "
            f"over {self.device.peer_gbs or self.device.host_gbs:g} GB/s, not measured"
        )
