"""Where a run is: written by the run at every change of phase and every log line, read by `draftmill status`."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from draftmill.errors import UserError
from draftmill.run.events import EventLog, tail
from draftmill.run.files import RunFolder, write_atomically

ENDED = ("finished", "stopped", "failed")
PHASES = ("loading", "compiling", "training", "checking", *ENDED)
EXIT_CODES = {"running": 0, "finished": 0, "stopped": 3, "failed": 4, "died": 4}
WAITS_MUCH = 0.1
TREND_LINES = 80
WAIT_SECONDS = 0.2
WARNINGS = 3  # newest, shown


class StatusWriter:
    """The run's own account of itself. Each write replaces the file as a whole."""

    def __init__(self, folder: RunFolder, total_steps: int | None = None) -> None:
        self._path = folder.status
        self._events = EventLog(folder.events)
        self._values: dict[str, Any] = {"pid": os.getpid(), "started": time.time(), "total_steps": total_steps}

    def phase(self, name: str, **details: Any) -> None:
        """Enter a phase: loading, training, checking, finished, stopped, failed."""
        reason = f": {details['reason']}" if details.get("reason") else ""
        self._events.add("phase", f"{name}{reason}", step=details.get("step", self._values.get("step")))
        self.update(phase=name, since=time.time(), **details)

    @property
    def current(self) -> str:
        return str(self._values.get("phase", "starting"))

    def update(self, **values: Any) -> None:
        for name, worker in values.get("workers", {}).items():
            if worker["phase"] != self._values.get("workers", {}).get(name, {}).get("phase"):
                self._events.add("phase", worker["phase"], worker=name, pid=worker["pid"])
        self._values.update(values, updated=time.time())
        write_atomically(self._path, json.dumps(self._values))


def read_status(root: Path) -> dict[str, Any]:
    """The status of a run folder, with `state`: running, finished, stopped, failed or died. From files alone."""
    folder = RunFolder(root)
    if not folder.status.exists():
        raise UserError(f"{root} holds no run (no status.json); give the run_dir of a run")
    status: dict[str, Any] = json.loads(folder.status.read_text())
    if status["phase"] in ENDED:
        status["state"] = status["phase"]
    else:
        status["state"] = "running" if folder.is_locked() else "died"
    checkpoints = sorted(str(manifest.parent) for manifest in folder.checkpoints.glob("step-*/manifest.json"))
    status["last_checkpoint"] = checkpoints[-1] if checkpoints else None
    status["trends"] = trends(tail(folder.metrics))
    status["warnings"] = [event for event in tail(folder.events) if event.get("kind") == "warning"][-WARNINGS:]
    status["held_back_by"] = held_back_by(status)
    return status


def trends(rows: list[dict[str, Any]]) -> dict[str, str]:
    """falling, flat or rising, of loss and τ: the mean of the newest quarter of the last lines against that of the
    quarter before it, where they differ by more than their own scatter allows (two standard errors)."""
    found = {}
    for key in ("loss", "tau_teacher_forced"):
        values = [row[key] for row in rows[-TREND_LINES:] if row.get(key) is not None]
        quarter = len(values) // 4
        if quarter >= 2:
            before, now = values[-2 * quarter : -quarter], values[-quarter:]
            error = math.sqrt((statistics.variance(before) + statistics.variance(now)) / quarter)
            change = statistics.mean(now) - statistics.mean(before)
            found[key] = "flat" if abs(change) <= 2 * error else "rising" if change > 0 else "falling"
    return found


def held_back_by(status: dict[str, Any]) -> str | None:
    """One sentence: which side the other waits for, and what would help. None while neither waits much, or unknown."""
    waits = status.get("waits") or {}
    targets, drafters = waits.get("targets_wait") or 0.0, waits.get("drafters_wait") or 0.0
    if status["state"] != "running" or max(targets, drafters) < WAITS_MUCH:
        return None
    if drafters > targets:
        return f"the targets: drafters wait {drafters:.0%} of the time; more devices for targets would help"
    return f"the drafter: targets wait {targets:.0%} of the time; more drafter ranks, or fewer targets, would help"


def describe(status: dict[str, Any], now: float) -> list[tuple[str, str]]:
    """Rows of the status table."""
    rows = [("state", _state_line(status, now))]
    if status.get("step") is not None:
        rows.append(("step", f"{status['step']} of {status['total_steps']}"))
    for key, label, form in (
        ("loss", "loss", "{:.3f}"),
        ("tau", "τ (teacher-forced)", "{:.2f}"),
        ("tokens_per_second", "context tokens/s", "{:,.0f}"),
    ):
        if status.get(key) is not None:
            trend = status["trends"].get({"tau": "tau_teacher_forced"}.get(key, key))
            rows.append((label, form.format(status[key]) + (f" ({trend})" if trend else "")))
    if status["state"] == "running" and status["phase"] == "training":
        eta = status.get("eta_seconds")
        rows.append(("time left", "estimating" if eta is None else duration(eta)))
    rows += _workers(status, now)
    if status.get("skipped"):
        rows.append(("skipped updates", f"{status['skipped']} (non-finite gradients)"))
    if check := status.get("decode_check"):
        verdict = "WARNING: training and decoding disagree" if check["flagged"] else "training and decoding agree"
        rows.append(("decode check", f"τ {check['tau_decoded']:.2f}; {verdict}"))
    if status.get("reason"):
        rows.append(("reason", status["reason"]))
    if status["held_back_by"]:
        rows.append(("held back by", status["held_back_by"]))
    rows += [("warning", f"{duration(now - event['time'])} ago: {event['text']}") for event in status["warnings"]]
    rows.append(("last checkpoint", status["last_checkpoint"] or "none yet"))
    return rows


def wait_for_phase(root: Path, phase: str) -> dict[str, Any]:
    """Return the status once the run is in `phase`, or has ended in whatever way. UserError for an unknown phase."""
    if phase not in PHASES:
        raise UserError(f"--wait {phase}: no such phase; phases are {', '.join(PHASES)}")
    while True:
        status = read_status(root)
        if status["phase"] == phase or status["state"] != "running":
            return status
        time.sleep(WAIT_SECONDS)


def table(status: dict[str, Any], now: float) -> Table:
    """`describe` as it is shown."""
    grid = Table(show_header=False, box=None)
    for name, text in describe(status, now):
        grid.add_row(name, Text(text))
    return grid


def _workers(status: dict[str, Any], now: float) -> list[tuple[str, str]]:
    """What each process does, and which side waits for the other."""
    if status["state"] != "running":
        return []
    rows = [
        (name, f"{worker['phase']} for {duration(now - worker['since'])} (process {worker['pid']})")
        for name, worker in status.get("workers", {}).items()
    ]
    waits = status.get("waits") or {}
    for side in ("targets", "drafters"):
        if (share := waits.get(f"{side}_wait")) is not None:
            rows.append((f"{side} wait", f"{share:.0%} of the time"))
    if status.get("restarts"):
        rows.append(("restarts", str(status["restarts"])))
    return rows


def _state_line(status: dict[str, Any], now: float) -> str:
    state, phase = status["state"], status["phase"]
    ago = duration(now - status["since"])
    if state == "running":
        return f"running: {phase} for {ago} (process {status['pid']})"
    if state == "died":
        silent = duration(now - status["updated"])
        return f"died while {phase} (last heard {silent} ago); go on with `draftmill train … --resume`"
    return f"{state} {ago} ago"


def duration(seconds: float) -> str:
    """41 s, 3 min 20 s, 2 h 05 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
