"""`draftmill doctor`: what is well and what is not, before anything is spent. Nothing is changed, no weight is loaded.

The machine is looked at here, a run's config in `doctor_checks`, its target in `doctor_target`, memory and disk in
`doctor_room`.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

Level = Literal["ok", "warning", "error"]
MARKS: dict[Level, tuple[str, str]] = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "error": ("✗", "bold red")}
SOFTWARE, GPUS, HOST = "software", "GPUs", "this machine"
FREE_SHARE = 0.9  # of a GPU's memory; with less, somebody else is using it
BFLOAT16_CAPABILITY = (8, 0)
DRIVER = Path("/proc/driver/nvidia/version")

# Declared, but training does without them.
BESIDE_TRAINING = {
    "accelerate": "transformers may refuse to place the target's weights",
    "zstandard": "rows in .jsonl.zst files cannot be read",
    "matplotlib": "evaluate and export do not start",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """group, name: its place in the list. found: what is so. consequence, remedy: may be empty where all is well."""

    group: str
    name: str
    level: Level
    found: str
    consequence: str = ""
    remedy: str = ""


def doctor(config: Path | None, overrides: list[str], *, as_json: bool = False) -> int:
    """Print all findings. Returns the exit code: 2 where one of them is an error, else 0."""
    findings = list(examine(config, overrides))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1, ensure_ascii=False))
    else:
        console = Console(highlight=False)
        for part in rendered(findings):
            console.print(part)
    return 2 if any(finding.level == "error" for finding in findings) else 0


def examine(config: Path | None, overrides: list[str]) -> Iterator[Finding]:
    """The machine's findings, then those of the config, if there is one."""
    packages = [python_version(), *required_packages()]
    yield from packages
    if any(finding.level == "error" for finding in packages):
        return  # the other checks import them
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield torch_build(torch.__version__, torch.version.cuda, gpus=count)
    yield from optional_packages(gpus=count)
    yield from gpus(count)
    yield from host()
    if count and importlib.util.find_spec("triton") is not None:
        yield from triton_compiler()
    if config is not None:
        yield from examine_config(config, overrides)


def examine_config(path: Path, overrides: list[str]) -> Iterator[Finding]:
    """The config, then all that `train` would settle before it loads a weight, then room."""
    from draftmill.config import load_run_config
    from draftmill.errors import UserError
    from draftmill.run import doctor_checks, doctor_ports, doctor_room, doctor_speed, doctor_target

    try:
        config = load_run_config(path, overrides)
    except UserError as error:
        yield Finding(doctor_checks.CONFIG, "file", "error", str(error), doctor_checks.REFUSED)
        return
    yield Finding(doctor_checks.CONFIG, "file", "ok", f"{path}: all keys are known, all values possible")
    parts = doctor_checks.settle_parts(config)
    yield from parts.refusals
    yield from doctor_checks.what_is_settled(config, parts)
    cache = doctor_target.look_at_cache(config, parts)
    yield from cache.findings
    target_bytes = None
    if parts.target is not None:
        finding, target_bytes = doctor_target.weights(config, parts.target, needed=not cache.complete)
        yield finding
        yield from doctor_target.recurrent_layers(config, parts)
        yield from doctor_speed.layer_speed(config, parts)
    if parts.built is not None:
        yield from doctor_room.room(config, parts, 0 if cache.complete else target_bytes, cache.missing_bytes)
    yield from doctor_ports.network(config, parts.placement)
    yield doctor_checks.run_folder(config, parts.built)


def rendered(findings: list[Finding]) -> Iterator[RenderableType]:
    """Grouped, errors last, then the sum."""
    errors = [finding for finding in findings if finding.level == "error"]
    width = max(len(finding.name) for finding in findings)
    for group in dict.fromkeys(finding.group for finding in findings):
        yield from _section(group, (f for f in findings if f.group == group and f.level != "error"), width)
    yield from _section("errors", errors, width)
    warnings = sum(finding.level == "warning" for finding in findings)
    yield Text(
        f"\n{_counted(len(errors), 'error')}, {_counted(warnings, 'warning')}: "
        + ("mend the errors first" if errors else "nothing stands in the way")
    )


def _section(title: str, findings: Iterable[Finding], width: int) -> Iterator[RenderableType]:
    grid = Table.grid(padding=(0, 1))
    grid.add_column()
    grid.add_column(width=width, no_wrap=True)
    grid.add_column(overflow="fold")
    for finding in findings:
        mark, style = MARKS[finding.level]
        more = [line for line in (finding.consequence, finding.remedy) if line]
        grid.add_row(Text(mark, style), Text(finding.name), Text("\n→ ".join([finding.found, *more])))
    if grid.row_count:
        yield Text(f"\n{title}", "bold")
        yield grid


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


# --- software ---------------------------------------------------------------------------------------------------------


def python_version() -> Finding:
    return Finding(SOFTWARE, "python", "ok", f"{platform.python_version()} at {sys.executable}")


def required_packages() -> Iterator[Finding]:
    """Every package that draftmill declares, against what is installed: one finding for all that are as they should."""
    if installed("draftmill") is None:
        found = "draftmill runs from its source without being installed, so what it needs is not known"
        yield Finding(
            SOFTWARE, "packages", "warning", found, "a command may stop for a missing package", "pip install ."
        )
        return
    right = []
    for name, least in declared():
        version = installed(name)
        if version is not None and release(version) >= release(least):
            right.append(f"{name} {version}")
        else:
            yield _unfit(name, least, version)
    yield Finding(SOFTWARE, "packages", "ok", ", ".join(right))


def _unfit(name: str, least: str, version: str | None) -> Finding:
    found = f"{name} is not installed" if version is None else f"{name} {version}, older than {least}"
    remedy = f"pip install '{name}>={least}'"
    if name in BESIDE_TRAINING:
        return Finding(SOFTWARE, name, "warning", found, BESIDE_TRAINING[name], remedy)
    consequence = "draftmill cannot run" if version is None else "draftmill is not made for it, and may fail half-way"
    consequence += "; nothing else was looked at"
    return Finding(SOFTWARE, name, "error", found, consequence, remedy)


def declared() -> Iterator[tuple[str, str]]:
    """(name, least version) of each package that draftmill needs, extras left out."""
    for line in metadata.requires("draftmill") or []:
        if "extra ==" not in line and (match := re.match(r"([\w.-]+)\s*>=\s*([\d.]+)", line)):
            yield match[1], match[2]


def release(version: str) -> tuple[int, ...]:
    """The numbers that order versions: "2.13.0+cpu" → (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def torch_build(version: str, cuda: str | None, *, gpus: int) -> Finding:
    """Whether this torch can use what the host has."""
    found = f"{version}, built for {'CPUs only' if cuda is None else f'CUDA {cuda}'}"
    driver = driver_version()
    if gpus or driver is None:
        return Finding(SOFTWARE, "torch", "ok", found)
    why = "is built for CPUs" if cuda is None else f"may need a newer driver for CUDA {cuda}, or all GPUs are hidden"
    return Finding(
        SOFTWARE,
        "torch",
        "warning",
        f"{found}; the host has NVIDIA's driver {driver}, but torch sees no GPU",
        f"everything runs on the CPU: this torch {why}",
        "install a CUDA build of torch (pytorch.org), look at CUDA_VISIBLE_DEVICES, or update the driver",
    )


def optional_packages(*, gpus: int) -> Iterator[Finding]:
    """What draftmill can do without, and what its lack costs."""
    yield _optional(
        "triton",
        "triton",
        "on a GPU the drafter's step runs plain, several times slower, and only with train.kernels=plain"
        + ("" if gpus else "; a CPU never needs it"),
        "install a CUDA build of torch, which brings triton",
        "warning" if gpus else "ok",
    )
    yield _optional(
        "fla",
        "flash-linear-attention",
        "targets with gated delta net layers would run on transformers' slow substitute; others do not need it",
        "pip install flash-linear-attention",
    )
    yield _optional("gguf", "gguf", "targets in .gguf files cannot be read", "pip install 'draftmill[gguf]'")


def _optional(module: str, package: str, consequence: str, remedy: str, level: Level = "ok") -> Finding:
    if importlib.util.find_spec(module) is not None:
        return Finding(SOFTWARE, package, "ok", installed(package) or "installed")
    return Finding(SOFTWARE, package, level, "not installed", consequence, remedy)


# --- GPUs -------------------------------------------------------------------------------------------------------------


def gpus(count: int) -> Iterator[Finding]:
    if not count:
        yield Finding(GPUS, "none", "ok", "torch sees no GPU; all work is done on the CPU")
        return
    yield Finding(GPUS, "driver", "ok", driver_version() or f"unknown: {DRIVER} cannot be read")
    yield from (_gpu(number) for number in range(count))
    if count > 1:
        yield peers(count)


def driver_version() -> str | None:
    """Of NVIDIA's kernel module; None where there is none or it does not say."""
    try:
        text = DRIVER.read_text()
    except OSError:
        return None
    match = re.search(r"\d+\.\d+(\.\d+)?", text)
    return match[0] if match else None


def _gpu(number: int) -> Finding:
    import torch

    name = f"cuda:{number}"
    try:
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        remedy = "look at nvidia-smi: another process may hold it for itself, or it is broken"
        return Finding(GPUS, name, "error", f"cannot be used ({why})", "a run on it would fail", remedy)
    capability = (properties.major, properties.minor)
    found = (
        f"{properties.name}, {total / 1e9:.1f} GB, {free / 1e9:.1f} GB free, compute capability "
        f"{capability[0]}.{capability[1]}"
    )
    if capability < BFLOAT16_CAPABILITY:
        consequence = "it has no bfloat16: the fused step does not run on it, bfloat16 targets are slow"
        return Finding(GPUS, name, "warning", found, consequence, "use target.dtype=float16 and train.dtype=float32")
    if free < FREE_SHARE * total:
        consequence = f"other processes hold {(total - free) / 1e9:.1f} GB: less fits, and both sides are slower"
        return Finding(
            GPUS, name, "warning", found, consequence, "end them (nvidia-smi lists them), or use another GPU"
        )
    return Finding(GPUS, name, "ok", found)


def peers(count: int) -> Finding:
    """Which pairs of GPUs reach each other's memory."""
    import torch

    pairs = list(itertools.permutations(range(count), 2))
    apart = [f"{one}→{two}" for one, two in pairs if not torch.cuda.can_device_access_peer(one, two)]
    if not apart:
        return Finding(GPUS, "peer access", "ok", f"all {count} GPUs reach each other's memory")
    consequence = "between these, hidden states go through host memory (handoff.queue=host)"
    remedy = "`nvidia-smi topo -m` shows how they are connected; nothing need be done"
    return Finding(GPUS, "peer access", "warning", f"not between {', '.join(apart)}", consequence, remedy)


# --- the host ---------------------------------------------------------------------------------------------------------


def host() -> Iterator[Finding]:
    import psutil

    from draftmill.data.config import available_cpus
    from draftmill.run.placement import available_memory

    total, free = psutil.virtual_memory().total, available_memory()
    yield Finding(HOST, "memory", "ok", f"{total / 1e9:.1f} GB, {free / 1e9:.1f} GB can still be had")
    yield shared_memory()
    yield Finding(HOST, "CPU cores", "ok", f"{available_cpus()} for this process, of {os.cpu_count()}")
    yield temporary_files()


def shared_memory() -> Finding:
    """Whether processes can share memory the way the queue does."""
    try:
        os.close(os.memfd_create("draftmill-doctor"))
    except OSError as error:
        found = f"the system refuses anonymous memory files ({error.strerror})"
        remedy = "allow memfd_create in the container's seccomp profile"
        return Finding(HOST, "shared memory", "error", found, "runs with devices.targets do not start", remedy)
    return Finding(HOST, "shared memory", "ok", "anonymous memory files work")


def temporary_files() -> Finding:
    try:
        used = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        return Finding(HOST, "TMPDIR", "error", str(error), "several commands stop", "set TMPDIR to a writable folder")
    wanted = os.environ.get("TMPDIR")
    if wanted is not None and used.resolve() != Path(wanted).resolve():
        found = f"TMPDIR={wanted} cannot be written; {used} is used"
        return Finding(HOST, "TMPDIR", "warning", found, "temporary files lie elsewhere than you said", "mend TMPDIR")
    return Finding(HOST, "TMPDIR", "ok", f"{used} can be written")


def triton_compiler() -> Iterator[Finding]:
    """What Triton needs to compile a kernel: a place to keep it, and a C compiler with Python's headers."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    if why := not_writable(cache):
        remedy = "set TRITON_CACHE_DIR to a folder that can be written"
        yield Finding(HOST, "Triton's cache", "error", why, "the fused step cannot be compiled", remedy)
    else:
        yield Finding(HOST, "Triton's cache", "ok", f"{cache} can be written")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    lacks = [what for what, there in (("a C compiler", compiler), (str(header), header.exists())) if not there]
    if lacks:
        consequence = "Triton cannot build what starts its kernels, unless an earlier run left that in its cache"
        remedy = "install gcc and Python's headers (python3-dev), or set CC"
        yield Finding(HOST, "C compiler", "warning", f"{' and '.join(lacks)} is missing", consequence, remedy)
    else:
        yield Finding(HOST, "C compiler", "ok", f"{compiler}, with Python's headers")


def nearest(path: Path) -> Path:
    """The path itself or the nearest of its parents that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def not_writable(folder: Path) -> str | None:
    """Why no file can be made in `folder`, or in the nearest of its parents that exists. Leaves nothing there."""
    place = nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"{place} cannot be written ({error.strerror})"
