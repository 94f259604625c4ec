"""Serves the numbers of a run's status to Prometheus, in a process of its own: `python -m draftmill.run.prometheus ROOT
HANDLE`, ended by the end of stdin. HANDLE is the listening socket's.

It answers from status.json, so whatever the run's own processes are busy or stuck with.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from draftmill.run.files import RunFolder

# name → (keys within status.json, what it is)
PLAIN: dict[str, tuple[tuple[str, ...], str]] = {
    "step": (("step",), "Finished optimizer steps"),
    "total_steps": (("total_steps",), "Steps of the whole schedule"),
    "loss": (("loss",), "Loss of the last log line"),
    "tau": (("tau",), "Teacher-forced tau of the last log line"),
    "tokens_per_second": (("tokens_per_second",), "Context tokens per second, steady"),
    "left_seconds": (("eta_seconds",), "Time left at the last log line"),
    "skipped_updates": (("skipped",), "Updates left out so far"),
    "restarts": (("restarts",), "Workers started anew since the run's last start"),
    "targets_wait_ratio": (("waits", "targets_wait"), "Share of time that targets waited for a slot"),
    "drafters_wait_ratio": (("waits", "drafters_wait"), "Share of time that drafters waited for a batch"),
    "slots_in_use": (("slots_in_use",), "Slots of the queue that hold or await a batch"),
    "updated_timestamp_seconds": (("updated",), "When the run last wrote its status"),
    "host_memory_used_bytes": (("load", "host", "memory_used"), "Memory in use on the host"),
    "host_memory_total_bytes": (("load", "host", "memory_total"), "Memory of the host"),
    "own_memory_bytes": (("load", "host", "own_rss"), "Memory of the run's processes"),
    "disk_free_bytes": (("load", "host", "disk_free"), "Free space where the run's folder is"),
}
WORKERS = {
    "worker_stalled": "1 while the worker makes no progress where it should",
    "worker_moved_timestamp_seconds": "When the worker last made progress",
}
DEVICES = {
    "device_memory_used_bytes": ("memory_used", "Memory in use on the device"),
    "device_memory_total_bytes": ("memory_total", "Memory of the device"),
    "device_utilisation_ratio": ("utilisation", "Share of time the device was busy"),
    "device_power_watts": ("power_watts", "Power the device draws"),
}
PHASE = "1 for the phase that the run or a worker is in"
SINCE = "When that phase began"
THROTTLED = "1 while the device is slowed down, for each reason"


class StatusCollector(Collector):
    """Reads the file anew whenever it is asked. What is unknown is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def collect(self) -> Iterator[GaugeMetricFamily]:
        try:
            status = json.loads(self._path.read_text())
        except FileNotFoundError:  # the run has only just begun
            return
        for name, (keys, about) in PLAIN.items():
            yield _family(name, about, (), [((), _within(status, keys))])
        workers = status.get("workers") or {}
        everybody = [("run", status), *workers.items()]
        phases = [((name, one["phase"]), 1) for name, one in everybody if one.get("phase")]
        yield _family("phase", PHASE, ("worker", "phase"), phases)
        since = [((name,), one.get("since")) for name, one in everybody]
        yield _family("phase_since_timestamp_seconds", SINCE, ("worker",), since)
        stalled = [((name,), int(worker.get("stalled") is not None)) for name, worker in workers.items()]
        moved = [((name,), worker.get("moved")) for name, worker in workers.items()]
        for (name, about), samples in zip(WORKERS.items(), (stalled, moved), strict=True):
            yield _family(name, about, ("worker",), samples)
        devices = (status.get("load") or {}).get("devices") or []
        for name, (key, about) in DEVICES.items():
            yield _family(name, about, ("device",), [((str(one["device"]),), one.get(key)) for one in devices])
        reasons = [((str(one["device"]), reason), 1) for one in devices for reason in one.get("throttled") or []]
        yield _family("device_throttled", THROTTLED, ("device", "reason"), reasons)


def _family(
    name: str, about: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], Any]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"draftmill_{name}", about, labels=labels)
    for values, number in samples:
        if number is not None:
            family.add_metric(values, number)
    return family


def _within(values: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def main() -> None:
    registry = CollectorRegistry()
    registry.register(StatusCollector(RunFolder(Path(sys.argv[1])).status))
    server = ThreadingHTTPServer(("", 0), MetricsHandler.factory(registry), bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=int(sys.argv[2]))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)  # whoever is still being answered is cut off


if __name__ == "__main__":
    main()
