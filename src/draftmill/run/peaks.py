"""The most memory that a command and its processes hold at once: on the host, and on each GPU of a run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from draftmill.run.background import repeated
from draftmill.run.load import Gpus, open_gpus, own_memory

SECONDS = 0.25


@contextmanager
def peaks_of(status: Path) -> Iterator[Peaks]:
    """Samples while it lasts. status: the status file of the run, which names its devices."""
    peaks = Peaks(status)
    peaks.sample()
    with repeated("peaks", SECONDS, peaks.sample):
        yield peaks


class Peaks:
    """host_bytes: of this process and its children, shared memory counted once. gpus: device → (bytes in use by
    anybody, bytes it has). blind: whether a GPU was used whose driver cannot be asked.
    """

    def __init__(self, status: Path) -> None:
        self.host_bytes = 0
        self.gpus: dict[str, tuple[int, int]] = {}
        self.blind = False
        self._status = status
        self._nvml: Gpus | None = None

    def sample(self) -> None:
        own = psutil.Process()
        pids = {own.pid, *(child.pid for child in own.children(recursive=True))}
        self.host_bytes = max(self.host_bytes, own_memory(pids))
        for device in self._devices():
            used, total = self._read(device)
            if used is None or total is None:
                self.blind = True
            else:
                self.gpus[device] = (max(used, self.gpus.get(device, (0, 0))[0]), total)

    def _devices(self) -> set[str]:
        with contextlib.suppress(OSError, ValueError):
            workers = json.loads(self._status.read_text()).get("workers", {}).values()
            return {str(worker["device"]) for worker in workers if str(worker["device"]).startswith("cuda")}
        return set()

    def _read(self, device: str) -> tuple[int | None, int | None]:
        if self._nvml is None:
            try:
                self._nvml = open_gpus()
            except Exception:  # no package or no driver: whoever reads the table is told
                return None, None
        row = self._nvml.read(device)
        return row["memory_used"], row["memory_total"]
