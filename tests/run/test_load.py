"""Load of devices and host: read through a stand-in of pynvml, and for real on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_helpers import wait_for

from draftmill.run import load
from draftmill.run.console import noting
from draftmill.run.events import EventLog, tail
from draftmill.run.files import RunFolder
from draftmill.run.load import Gpus, load_shown, own_memory, physical
from draftmill.run.status import StatusWriter, read_status


class FakeNvml:
    """pynvml's functions, as far as they are used."""

    class NVMLError(Exception):
        pass

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        self.busy, self.bits, self.without = 50, 0, without

    def nvmlInit(self) -> None:  # noqa: N802
        self._maybe("init")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"gpu {index}"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        return f"gpu {name}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        self._maybe("memory")
        return SimpleNamespace(used=int(61.2e9), total=int(141e9))

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        self._maybe("utilisation")
        return SimpleNamespace(gpu=self.busy, memory=3)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        self._maybe("power")
        return 698_500

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:  # noqa: N802
        self._maybe("reasons")
        return self.bits

    def _maybe(self, what: str) -> None:
        if what in self.without:
            raise self.NVMLError(what)


def test_a_gpu_is_read_and_smoothed_over_five_samples() -> None:
    nvml = FakeNvml()
    gpus = Gpus(nvml)
    first = gpus.read("cuda:0")
    assert first == {
        "memory_used": int(61.2e9), "memory_total": int(141e9), "utilisation": 0.5, "power_watts": 698.5,
        "throttled": [],
    }  # fmt: skip
    nvml.busy, nvml.bits = 100, 0x01 | 0x04 | 0x40  # idle, power limit, heat
    assert gpus.read("cuda:0")["throttled"] == []  # one sample of two is a moment
    assert gpus.read("cuda:0")["throttled"] == ["heat", "power limit"]
    for _ in range(5):
        last = gpus.read("cuda:0")
    assert last["utilisation"] == 1.0


def test_what_a_driver_does_not_tell_is_unknown() -> None:
    gpus = Gpus(FakeNvml(without=("memory", "power", "reasons")))
    assert gpus.read("cuda:3") == {
        "memory_used": None, "memory_total": None, "utilisation": 0.5, "power_watts": None, "throttled": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "visible", "wanted"),
    [
        ("cuda:1", None, (1, False)),
        ("cuda", None, (0, False)),
        ("cuda:1", "4, 6", (6, False)),
        ("cuda:0", "GPU-8f3a", ("GPU-8f3a", True)),
        ("cuda:0", "MIG-77", ("MIG-77", True)),
    ],
)
def test_torch_and_nvml_number_gpus_differently(device: str, visible: str | None, wanted: tuple[Any, bool]) -> None:
    assert physical(device, visible) == wanted


def test_without_pynvml_one_warning_names_consequence_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load, "SECONDS", 0.05)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # import fails
    folder = RunFolder(tmp_path)
    status, events = StatusWriter(folder), EventLog(folder.events)
    with folder.locked(), noting(events.warning), load_shown(tmp_path, ["cuda:0", "cuda:1"], status):
        wait_for(lambda: "load" in status.snapshot()[0], 20)
        devices = read_status(tmp_path)["load"]["devices"]
    assert [(one["device"], one["utilisation"]) for one in devices] == [("cuda:0", None), ("cuda:1", None)]
    warnings = [event["text"] for event in tail(folder.events) if event["kind"] == "warning"]
    assert len(warnings) == 1
    assert "cannot tell how busy the GPUs are" in warnings[0]
    assert "pip install nvidia-ml-py" in warnings[0]
    assert capsys.readouterr().err.count("nvidia-ml-py") == 1


def test_a_run_on_cpus_is_sampled_without_any_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "SECONDS", 0.05)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    folder = RunFolder(tmp_path)
    status = StatusWriter(folder)
    with load_shown(tmp_path, ["cpu", "cpu"], status):
        wait_for(lambda: "load" in status.snapshot()[0], 20)
    found = status.snapshot()[0]["load"]
    assert [one["device"] for one in found["devices"]] == ["cpu"]
    assert 0 <= found["devices"][0]["utilisation"] <= 1
    host = found["host"]
    assert 0 < host["own_rss"] < host["memory_used"] < host["memory_total"]
    assert host["disk_free"] > 0
    assert tail(folder.events) == []


HOLDS = """
import mmap, os, sys
shared = mmap.mmap({number}, {size})
sum(shared[at] for at in range(0, {size}, 4096))
print("ready", flush=True); sys.stdin.read()
"""


def test_memory_that_processes_share_is_counted_once() -> None:
    size = 200 << 20
    number = os.memfd_create("slots")
    os.truncate(number, size)
    os.pwrite(number, b"\1" * size, 0)
    code = HOLDS.format(number=number, size=size)
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, pass_fds=[number]) for _ in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        assert size < own_memory({process.pid for process in processes}) < 1.9 * size
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        os.close(number)
