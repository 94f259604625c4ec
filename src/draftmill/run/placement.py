"""Which device does what: from the user's wish, or from what the host has."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch

from draftmill.config import DevicesConfig
from draftmill.errors import UserError


@dataclass(frozen=True, slots=True)
class Placement:
    """One process per entry; `targets` is empty where each drafter rank runs the target itself (inline)."""

    targets: tuple[str, ...]
    drafters: tuple[str, ...]

    @property
    def inline(self) -> bool:
        return not self.targets

    @property
    def alone(self) -> bool:
        """One device for everything: no other process is needed."""
        return self.inline and len(self.drafters) == 1

    @property
    def ranks(self) -> int:
        return len(self.drafters)

    @property
    def processes(self) -> int:
        return len(self.targets) + len(self.drafters)

    def describe(self) -> str:
        if self.inline:
            return f"{', '.join(self.drafters)}: target and drafter take turns"
        return f"targets on {', '.join(self.targets)}; drafter on {', '.join(self.drafters)}"


def settle(devices: DevicesConfig, accumulation: int) -> Placement | None:
    """The placement the config names, checked against the host. None: `auto` has several GPUs to choose from."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices.inline is None and devices.targets is None:
        return None if count > 1 else Placement((), ("cuda:0" if count else "cpu",))
    placement = Placement(devices.targets or (), devices.inline or devices.drafters or ())
    for name in (*placement.targets, *placement.drafters):
        if name != "cpu" and int(name.removeprefix("cuda:")) >= count:
            has = f"torch sees {count} CUDA device{'s' if count != 1 else ''}"
            raise UserError(f"devices: {name}, but {has}; name devices that are there, or cpu")
    return check_ranks(placement, accumulation)


def check_ranks(placement: Placement, accumulation: int) -> Placement:
    """Every rank must get as many batches of a step as the others."""
    ranks = placement.ranks
    if accumulation % ranks:
        multiple = -(-accumulation // ranks) * ranks
        raise UserError(
            f"train.accumulation: {accumulation} batches per step cannot be shared evenly by {ranks} drafter ranks; "
            f"set train.accumulation={multiple}, or another number of devices"
        )
    if len({name.partition(":")[0] for name in placement.drafters}) > 1:
        raise UserError("devices: drafter ranks are on CPU and CUDA at once; they cannot share gradients. Use one kind")
    return placement


def default_slots(placement: Placement) -> int:
    """Per rank: two leases for each target, spread over the ranks, and one batch ready while one is trained on."""
    return -(-2 * len(placement.targets) // placement.ranks) + 1


def threads_per_process(wanted: int | None, processes: int) -> int:
    if wanted is not None:
        return wanted
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return max(1, len(os.sched_getaffinity(0)) // processes)


def available_memory() -> int:
    """Bytes of host memory that can still be had, a container's limit included."""
    free = int(psutil.virtual_memory().available)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit) as top, open(used) as now:  # noqa: PTH123
                free = min(free, int(top.read()) - int(now.read()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return free
