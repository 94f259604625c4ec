"""How busy the devices and the host of a run are: sampled by a thread of its main process, which never touches CUDA.

NVIDIA's management library tells of the GPUs (NVML, by pynvml from nvidia-ml-py), psutil of the rest.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from draftmill.run.background import repeated
from draftmill.run.console import say
from draftmill.run.status import StatusWriter

SECONDS = 2.0
SMOOTHED = 5  # samples: a GPU's utilisation is their mean, and it is throttled where most of them say so
# bits of nvmlDeviceGetCurrentClocksEventReasons, as nvml.h numbers them; clocks that idle or were chosen are no trouble
REASONS = {
    0x04: "power limit", 0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake",
}  # fmt: skip
MISSING = (
    "pynvml is missing or finds no driver ({reason}): `status` cannot tell how busy the GPUs are, what memory they use "
    "and whether they are throttled; training is not affected. Remedy: pip install nvidia-ml-py"
)

Row = dict[str, Any]


@contextmanager
def load_shown(root: Path, devices: Sequence[str], status: StatusWriter) -> Iterator[None]:
    """While this lasts, the status tells of the load. root: whose disk is looked at. devices: of the run."""
    sampler = LoadSampler(root, devices, status)
    with repeated("load", SECONDS, sampler.tell):
        yield


class LoadSampler:
    """See `load_shown`."""

    def __init__(self, root: Path, devices: Sequence[str], status: StatusWriter) -> None:
        self._root, self._status = root, status
        self._devices = list(dict.fromkeys("cpu" if d.startswith("cpu") else d for d in devices))
        self._gpus: Gpus | None = None
        self._gpus_sought = False
        psutil.cpu_percent()  # the first answer counts from nowhere

    def tell(self) -> None:
        if not self._gpus_sought:
            self._gpus_sought = True
            self._open_gpus()
        with contextlib.suppress(OSError):  # a full disk is met by those who must write
            self._status.update(load=self.sample())

    def sample(self) -> Row:
        devices = [_cpu() if d == "cpu" else {"device": d, **self._gpu(d)} for d in self._devices]
        workers = self._status.snapshot()[0].get("workers", {}).values()
        pids = {os.getpid(), *(int(worker["pid"]) for worker in workers)}
        memory = psutil.virtual_memory()
        host = {
            "memory_used": memory.total - memory.available,
            "memory_total": memory.total,
            "own_rss": own_memory(pids),
            "disk_free": shutil.disk_usage(self._root).free,
        }
        return {"time": time.time(), "devices": devices, "host": host}

    def _gpu(self, device: str) -> Row:
        return UNKNOWN if self._gpus is None else self._gpus.read(device)

    def _open_gpus(self) -> None:
        if all(device == "cpu" for device in self._devices):
            return
        try:
            self._gpus = open_gpus()
        except Exception as error:  # no package, no driver, a driver of another version: all the same here
            say(f"warning: {MISSING.format(reason=error)}")


UNKNOWN: Row = {
    "memory_used": None, "memory_total": None, "utilisation": None, "power_watts": None, "throttled": [],
}  # fmt: skip


def open_gpus() -> Gpus:
    """Raises where the package or the driver is missing, or they do not fit each other."""
    return Gpus(importlib.import_module("pynvml"))


class Gpus:
    """Reads GPUs by torch's names for them. nvml: the module pynvml. Raises what nvmlInit raises."""

    def __init__(self, nvml: Any) -> None:
        nvml.nvmlInit()
        self._nvml = nvml
        self._handles: dict[str, Any] = {}
        self._recent: dict[str, deque[tuple[float | None, frozenset[str]]]] = {}

    def read(self, device: str) -> Row:
        """Values the driver does not tell are None."""
        nvml = self._nvml
        handle = self._handle(device)
        if handle is None:
            return UNKNOWN
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        busy = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        recent = self._recent.setdefault(device, deque(maxlen=SMOOTHED))
        recent.append((None if busy is None else busy.gpu / 100, self._reasons(handle)))
        known = [share for share, _ in recent if share is not None]
        all_reasons = sorted({reason for _, reasons in recent for reason in reasons})
        return {
            "memory_used": None if memory is None else int(memory.used),
            "memory_total": None if memory is None else int(memory.total),
            "utilisation": round(sum(known) / len(known), 3) if known else None,
            "power_watts": None if power is None else power / 1000,
            "throttled": [r for r in all_reasons if sum(r in reasons for _, reasons in recent) * 2 > len(recent)],
        }

    def _reasons(self, handle: Any) -> frozenset[str]:
        newer = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        bits = self._ask(newer or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        return frozenset(word for bit, word in REASONS.items() if bits & bit)

    def _handle(self, device: str) -> Any:
        if device not in self._handles:
            number, by_uuid = physical(device, os.environ.get("CUDA_VISIBLE_DEVICES"))
            find = self._nvml.nvmlDeviceGetHandleByUUID if by_uuid else self._nvml.nvmlDeviceGetHandleByIndex
            self._handles[device] = self._ask(find, number)
        return self._handles[device]

    def _ask(self, function: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return function(argument)
        except self._nvml.NVMLError:
            return None


def physical(device: str, visible: str | None) -> tuple[int | str, bool]:
    """NVML's number of a torch device, or its UUID and True. visible: CUDA_VISIBLE_DEVICES.

    Where GPUs differ, torch counts the fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID; NVML always counts by bus.
    """
    index = int(device.partition(":")[2] or 0)
    names = [name.strip() for name in (visible or "").split(",") if name.strip()]
    if index >= len(names):
        return index, False
    return (int(names[index]), False) if names[index].isdecimal() else (names[index], True)


def own_memory(pids: set[int]) -> int:
    """Bytes that the processes hold together: what each has for itself, and once the largest part that one shares.

    Shared are the slots of the queue, the target's matrices and files; each process counts the pages it has touched.
    """
    alone, shared = 0, [0]
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            memory = psutil.Process(pid).memory_info()
            alone += memory.rss - memory.shared
            shared.append(memory.shared)
    return alone + max(shared)


def _cpu() -> Row:
    memory = psutil.virtual_memory()
    return {
        "device": "cpu",
        "memory_used": memory.total - memory.available,
        "memory_total": memory.total,
        "utilisation": round(psutil.cpu_percent() / 100, 3),
        "power_watts": None,
        "throttled": [],
    }
