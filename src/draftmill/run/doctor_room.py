"""Whether memory and disk suffice for a run, for `draftmill doctor`.

GB = 10^9 bytes. Nothing is allocated. Sums say what is in them; what is not known before is named.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from draftmill.config import RunConfig
from draftmill.drafter.memory import HEADROOM, PLAIN_BYTES, checkpoint_bytes, fewest_groups, parameters
from draftmill.handoff.copies import BUFFERS
from draftmill.handoff.device import check_device_room, reachable
from draftmill.handoff.shared import RingShape, check_room
from draftmill.run.build import Built
from draftmill.run.doctor import Finding, nearest
from draftmill.run.doctor_checks import REFUSED, Parts, attempt
from draftmill.run.job import step_settings
from draftmill.run.placement import available_memory

MEMORY, DISK = "memory", "disk"


def room(config: RunConfig, parts: Parts, target_bytes: int | None, cache_bytes: int) -> Iterator[Finding]:
    """target_bytes: of the loaded target, None where they are unknown. cache_bytes: still to be written."""
    assert parts.built is not None
    tied = bool(getattr(parts.target, "tie_word_embeddings", False))
    run = Room(config, parts.built, target_bytes, tied)
    yield run.host(available_memory())
    yield from run.queue(available_memory())
    yield from run.gpus(auto=parts.auto)
    yield from disk_space(config, parts.built, cache_bytes)


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Room:
    """What a run needs. target_bytes: of the loaded target, None where they are unknown. tied: embedding is head."""

    config: RunConfig
    built: Built
    target_bytes: int | None
    tied: bool

    @property
    def ring(self) -> RingShape:
        built, budget = self.built, self.config.data.token_budget
        return RingShape(built.placement.ranks, built.slots, budget, built.width, _dtype(self.config))

    @property
    def direct(self) -> bool:
        """Whether the slots lie in the drafters' GPUs."""
        placement, queue = self.built.placement, self.config.handoff.queue
        return not placement.inline and queue != "host" and reachable(placement.targets, placement.drafters)

    @property
    def matrices(self) -> int:
        spec = self.built.spec
        return (1 if self.tied else 2) * spec.vocab_size * spec.hidden_size * _dtype(self.config).itemsize

    @property
    def reused(self) -> int:
        """Bytes of kept states in each process with a target, in the end."""
        processes = len(self.built.placement.targets) or self.built.placement.ranks
        epoch = self.built.plan.batches_per_epoch * self.ring.slot_bytes
        return min(int(self.config.target.reuse_states_gb * 1e9 / processes), epoch)

    def host(self, available: int) -> Finding:
        """Of all processes together: what surely stays, and what is there while they load."""
        placement, size = self.built.placement, parameters(self.built.spec)
        runs_target = placement.targets or placement.drafters
        on_cpu, drafters_on_cpu = runs_target.count("cpu"), placement.drafters.count("cpu")
        needs = {
            f"{drafters_on_cpu} × drafter with optimizer": drafters_on_cpu * PLAIN_BYTES * size,
            "slots": 0 if placement.inline or self.direct else self.ring.total_bytes,
            "embedding and head": 0 if placement.inline else self.matrices,
            "reused states": on_cpu * self.reused,
        }
        loading = {
            f"{len(runs_target)} × target": len(runs_target) * (self.target_bytes or 0),
            "drafters on their way to GPUs": (placement.ranks - drafters_on_cpu) * 4 * size,
        }
        stays, total = sum(needs.values()), sum(needs.values()) + sum(loading.values())
        unknown = "; the target's size is unknown" if self.target_bytes is None else ""
        found = (
            f"at least {total / 1e9:.2f} GB = {_sum(needs | loading)}, not counting the processes themselves and a "
            f"CPU's activations; {available / 1e9:.2f} GB can be had{unknown}"
        )
        remedy = "use fewer processes, smaller data.token_budget or handoff.slots, or a host with more memory"
        if stays > available:
            return Finding(MEMORY, "host", "error", found, "memory runs out, and the system kills the run", remedy)
        if total > available:
            consequence = "memory may run out while the target is loaded; then the system kills the run"
            return Finding(MEMORY, "host", "warning", found, consequence, remedy)
        return Finding(MEMORY, "host", "ok", found)

    def queue(self, available: int) -> Iterator[Finding]:
        """Slots in host memory, as `train` checks them, and devices that cannot do what is asked."""
        if self.built.placement.inline:
            return
        if self.config.handoff.queue == "device" and not self.direct:
            found = (
                "handoff.queue: device, but these devices cannot write into each other's memory; use handoff.queue=host"
            )
            yield Finding(MEMORY, "queue", "error", found, REFUSED)
            return
        ring = self.ring
        refusals: list[Finding] = []
        if not self.direct:
            attempt(refusals, MEMORY, "queue", lambda: check_room(ring, available))
        yield from refusals
        if not refusals:
            where = "the drafters' GPUs" if self.direct else "host memory"
            slots = f"{ring.ranks} × {ring.slots} slots of {ring.slot_bytes / 1e9:.3f} GB"
            yield Finding(MEMORY, "queue", "ok", f"{slots} = {ring.total_bytes / 1e9:.2f} GB in {where}")

    def gpus(self, *, auto: bool) -> Iterator[Finding]:
        placement = self.built.placement
        devices = dict.fromkeys((*placement.targets, *placement.drafters))
        for device in [name for name in devices if name.startswith("cuda")][: 1 if auto else None]:
            try:
                free = torch.cuda.mem_get_info(device)[0]
            except RuntimeError:  # an error among the machine's findings already
                continue
            yield from self.on_gpu(device, free, auto=auto)

    def on_gpu(self, device: str, free: int, *, auto: bool = False) -> Iterator[Finding]:
        """auto: target and drafter need not share the device."""
        if device not in self.built.placement.drafters:
            yield self._target_alone(device, free)
            return
        if self.direct:
            refusals: list[Finding] = []
            room = free - 4 * parameters(self.built.spec)  # the masters are there first
            attempt(refusals, MEMORY, device, lambda: check_device_room(self.ring, device, room))
            yield from refusals
        beside = self.beside(device)
        finding = self._drafter(device, free, beside)
        if auto and finding.level == "error":
            alone = self._drafter(device, free, {"buffers": BUFFERS * self.ring.slot_bytes})
            if alone.level != "error" and (self.target_bytes or 0) <= free:
                found = f"target and drafter do not fit one GPU together; {alone.found}"
                finding = Finding(MEMORY, device, "ok", f"{found}; `train` will give them different GPUs")
        yield finding

    def beside(self, device: str) -> dict[str, int]:
        """What lies on a drafter's GPU beside what its step is counted with."""
        placement, slot = self.built.placement, self.ring.slot_bytes
        if placement.inline:
            return {"target": max(0, (self.target_bytes or 0) - self.matrices), "batch": slot}
        shares = device in placement.targets
        return {
            "target": (self.target_bytes or 0) if shares else 0,
            "slots" if self.direct else "buffers": (self.built.slots if self.direct else BUFFERS) * slot,
            "the target's buffers": BUFFERS * slot if shares else 0,
        }

    def _target_alone(self, device: str, free: int) -> Finding:
        needs = {"target": self.target_bytes or 0, "buffers": BUFFERS * self.ring.slot_bytes, "reused": self.reused}
        total = sum(needs.values())
        found = f"at least {total / 1e9:.2f} GB = {_sum(needs)}, its forward pass on top; {free / 1e9:.2f} GB free"
        if total <= free:
            return Finding(MEMORY, device, "ok", found)
        remedy = "lower target.reuse_states_gb or data.token_budget, or use a larger GPU"
        return Finding(MEMORY, device, "error", found, "the target does not fit", remedy)

    def _drafter(self, device: str, free: int, beside: dict[str, int]) -> Finding:
        if step_settings(self.config, self.built.spec, device).fused_rows is None:
            return self._plain(device, free, beside)
        rest = sum(beside.values())
        groups, step = fewest_groups(
            self.built.spec,
            free - rest,
            context_rows=self.config.data.token_budget,
            anchors=self.config.anchors,
            tied=self.tied,
            fp8=self.config.train.fp8,
        )
        also = _sum(beside)
        if groups is None:
            found = f"the step needs at least {step.describe()}, beside {also}; {free / 1e9:.1f} GB free"
            consequence = f"{REFUSED} (it takes {HEADROOM:.0%} of what is free)"
            remedy = "lower data.token_budget, give target and drafter different GPUs, or use a larger GPU"
            return Finding(MEMORY, device, "error", found, consequence, remedy)
        parts = f" in {groups} groups of blocks" if groups > 1 else ""
        found = f"step{parts}: about {step.describe()}; beside it {also}; {free / 1e9:.1f} GB free"
        reused = self.reused if not self.built.placement.targets or device in self.built.placement.targets else 0
        if step.total + rest + reused > free:
            consequence = f"reused states of {reused / 1e9:.2f} GB come on top, and memory runs out in the first epoch"
            return Finding(MEMORY, device, "warning", found, consequence, "lower target.reuse_states_gb")
        return Finding(MEMORY, device, "ok", found)

    def _plain(self, device: str, free: int, beside: dict[str, int]) -> Finding:
        needs = {
            "drafter with optimizer": PLAIN_BYTES * parameters(self.built.spec),
            "matrices": self.matrices,
            **beside,
        }
        total = sum(needs.values())
        found = f"at least {total / 1e9:.2f} GB = {_sum(needs)}, activations on top; {free / 1e9:.2f} GB free"
        if total <= free:
            return Finding(MEMORY, device, "ok", found)
        remedy = "lower data.token_budget, give target and drafter different GPUs, or use a larger GPU"
        return Finding(MEMORY, device, "error", found, "the plain step does not fit", remedy)


# --- disk -------------------------------------------------------------------------------------------------------------


def disk_space(config: RunConfig, built: Built, cache_bytes: int) -> Iterator[Finding]:
    """Checkpoints and cache, added up where they lie on the same file system."""
    bytes_each = checkpoint_bytes(built.spec, config.train.optimizer)
    saves = min(config.train.keep + 1, math.ceil(built.total_steps / config.train.save_every))
    there = sum(path.stat().st_size for path in config.run_dir.glob("checkpoints/step-*/*.safetensors"))
    needs = [(f"{saves} × checkpoint", config.run_dir, max(0, saves * bytes_each - there))]
    if config.cache is not None:
        needs.append(("cache", config.cache, cache_bytes))
    systems: dict[int, list[tuple[str, Path, int]]] = {}
    for need in needs:
        systems.setdefault(nearest(need[1]).stat().st_dev, []).append(need)
    for together in systems.values():
        yield _disk(together)


def _disk(needs: list[tuple[str, Path, int]]) -> Finding:
    place = nearest(needs[0][1])
    free, total = shutil.disk_usage(place).free, sum(size for _, _, size in needs)
    found = (
        f"{total / 1e9:.2f} GB = {_sum({name: size for name, _, size in needs})}; {free / 1e9:.2f} GB free at {place}"
    )
    name = " and ".join(name.split()[-1] for name, _, _ in needs)
    if total <= free:
        return Finding(DISK, name, "ok", found)
    consequence = "the run stops when the disk is full; its last complete checkpoint stays"
    remedy = "free space, lower train.keep or cache_gb, or choose folders on another disk"
    return Finding(DISK, name, "error", found, consequence, remedy)


def _sum(parts: dict[str, int]) -> str:
    return " + ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items() if size) or "nothing"


def _dtype(config: RunConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.target.dtype)
    return dtype
