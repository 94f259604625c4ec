"""One sentence: what holds a run back now, by which figures, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftmill.run.words import gigabytes

WAITS_MUCH = 0.1  # share of time
SAVES_MUCH = 0.05
RECOMPILES_OFTEN = 5  # in ten minutes
LITTLE_DISK_BYTES = 200e6  # where the size of a checkpoint is not known
IDLE_GPU = 0.6  # utilisation below which a GPU that waits for nobody has too little to do
HEAT = ("heat", "hardware slowdown", "power brake")  # see load.REASONS
POWER = "power limit"

Row = dict[str, Any]


def held_back_by(status: Row) -> str | None:
    """The first that applies, what stops the run before what slows it. None while nothing does, or it is not known."""
    if status["state"] != "running":
        return None
    return next(_stopping(status), None) or _slowing(status) or next(_lesser(status), None)


def _stopping(status: Row) -> Iterator[str]:
    for stall in status.get("stalled") or []:
        yield f"a stall: {stall}"
    free, needed = _host(status).get("disk_free"), status.get("checkpoint_bytes")
    if free is not None and free < (needed or LITTLE_DISK_BYTES):
        size = f", a checkpoint takes {gigabytes(needed)}" if needed else ""
        yield f"a full disk: {gigabytes(free)} are free{size}; free space, or the next checkpoint fails"
    for device in _devices(status):
        if hot := [reason for reason in device.get("throttled") or [] if reason in HEAT]:
            yield f"{device['device']}, which slows its clocks: {' and '.join(hot)}; look at cooling and power supply"


def _slowing(status: Row) -> str | None:
    """The costliest of what takes a share of the time."""
    waits = status.get("waits") or {}
    targets, drafters = waits.get("targets_wait") or 0.0, waits.get("drafters_wait") or 0.0
    saving = status.get("saving_share") or 0.0
    causes = [
        (drafters, WAITS_MUCH, f"the targets: drafters wait {drafters:.0%} of the time; more devices for targets"),
        (targets, WAITS_MUCH, f"the drafter: targets wait {targets:.0%} of the time; more drafter ranks"),
        (saving, SAVES_MUCH, f"saving: {saving:.0%} of the time goes into checkpoints; a larger train.save_every"),
    ]
    share, _, sentence = max(((s, limit, text) for s, limit, text in causes if s >= limit), default=(0.0, 0.0, ""))
    return f"{sentence} would help" if share else None


def _lesser(status: Row) -> Iterator[str]:
    count = status.get("recompiled") or 0
    if count >= RECOMPILES_OFTEN:
        yield (
            f"recompilation: {count} kernels were compiled in the last 10 minutes, after warm-up; events.jsonl names "
            "them and the reasons"
        )
    if status.get("phase") != "training" or status.get("steady_since") is None:
        return
    gpus = [device for device in _devices(status) if device.get("utilisation") is not None and _is_gpu(device)]
    idle = [device for device in gpus if device["utilisation"] < IDLE_GPU]
    if idle and len(idle) == len(gpus):
        least = min(idle, key=lambda device: float(device["utilisation"]))
        yield (
            f"small batches: {least['device']} is busy {least['utilisation']:.0%} of the time though no side waits; a "
            "larger data.token_budget would help"
        )
    for device in gpus:
        if POWER in (device.get("throttled") or []):
            watts = "" if device.get("power_watts") is None else f" ({device['power_watts']:.0f} W)"
            yield f"{device['device']}, at its power limit{watts}; a higher one (nvidia-smi -pl) would help, if allowed"


def _host(status: Row) -> Row:
    return dict((status.get("load") or {}).get("host") or {})


def _devices(status: Row) -> list[Row]:
    return list((status.get("load") or {}).get("devices") or [])


def _is_gpu(device: Row) -> bool:
    return str(device.get("device")).startswith("cuda")
