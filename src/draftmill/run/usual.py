"""How long phases usually take on this machine: kept from run to run in ~/.cache/draftmill/durations.jsonl.

A line: {"phase", "role", "target", "device", "seconds", "time"}. The file is a memory and no record: it is bounded, a
line that is cut is passed over, and where it cannot be read or written nothing is usual and nothing fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MEASURED = ("starting", "loading", "compiling", "warming up", "saving", "checking")
NEWEST = 5  # of a kind: usual is their median
MOST_BYTES = 256 << 10
KEPT_LINES = 800  # of a file that has grown beyond MOST_BYTES
LOADING_BYTES_PER_SECOND = 1e9  # the stated rule where nothing was measured: a local NVMe disk, read once
WEIGHTS = (".safetensors", ".bin", ".gguf")


@dataclass(frozen=True, slots=True)
class Kind:
    """What decides a duration. role: target, drafter or main, or the run with its devices. device: see `machine`."""

    phase: str
    role: str
    target: str
    device: str


def default_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "draftmill" / "durations.jsonl"


def record(kind: Kind, seconds: float, path: Path | None = None) -> None:
    """Keep a duration. Not kept where the file is locked by another run or cannot be written."""
    row = {**asdict(kind), "seconds": round(seconds, 3), "time": round(time.time())}
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        file_path = path or default_path()
        file_path.parent.mkdir(parents=True, exist_ok=True)
        with file_path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.tell() > MOST_BYTES:
                _shorten(file)
            file.write(_fresh_line(file) + json.dumps(row).encode() + b"\n")


def usual(kind: Kind, path: Path | None = None) -> float | None:
    """Median seconds of the newest five of this kind; None where there are none."""
    wanted = asdict(kind)
    found = [
        float(row["seconds"])
        for row in _rows(path)
        if {key: row.get(key) for key in wanted} == wanted and isinstance(row.get("seconds"), int | float)
    ]
    return statistics.median(found[-NEWEST:]) if found else None


def by_rule(phase: str, role: str, target: str) -> tuple[float, str] | None:
    """Seconds to expect where nothing was measured, and why so long; None where there is no rule."""
    if phase != "loading" or role not in ("target", "main"):
        return None
    size = weight_bytes(Path(target))
    gb_per_second = LOADING_BYTES_PER_SECOND / 1e9
    return (size / LOADING_BYTES_PER_SECOND, f"{size / 1e9:.1f} GB at {gb_per_second:g} GB/s") if size else None


def weight_bytes(folder: Path) -> int:
    """Of a target's files in a folder; 0 for a target that is elsewhere."""
    if not folder.is_dir():
        return 0
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in WEIGHTS)


@functools.cache
def machine(device: str) -> str:
    """The model of the hardware behind cpu or cuda:N: a home folder may be shared by several machines."""
    if device.startswith("cuda"):
        for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
            return _after_colon(path, "Model")
        return "cuda"
    return _after_colon(Path("/proc/cpuinfo"), "model name") or platform.machine()


def _after_colon(path: Path, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


def _rows(path: Path | None) -> list[dict[str, Any]]:
    try:
        lines = (path or default_path()).read_bytes().splitlines()
    except (OSError, RuntimeError):
        return []
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            rows += [row] if isinstance(row, dict) else []
    return rows


def _fresh_line(file: Any) -> bytes:
    """A line break where a kill has left half a line."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return b""
    file.seek(end - 1)
    return b"" if file.read(1) == b"\n" else b"\n"


def _shorten(file: Any) -> None:
    file.seek(0)
    lines = file.read().splitlines(keepends=True)[-KEPT_LINES:]
    file.truncate(0)  # what a kill in this moment loses was only a memory
    file.write(b"".join(lines))
    file.flush()
