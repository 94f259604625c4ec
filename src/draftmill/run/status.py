"""Where a run is: written by the run at every change of phase and every log line, read by `draftmill status`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from draftmill.errors import UserError
from draftmill.run.files import RunFolder, write_atomically

ENDED = ("finished", "stopped", "failed")


class StatusWriter:
    """The run's own account of itself. Each write replaces the file as a whole."""

    def __init__(self, folder: RunFolder, total_steps: int | None = None) -> None:
        self._path = folder.status
        self._values: dict[str, Any] = {"pid": os.getpid(), "started": time.time(), "total_steps": total_steps}

    def phase(self, name: str, **details: Any) -> None:
        """Enter a phase: loading, training, checking, finished, stopped, failed."""
        self.update(phase=name, since=time.time(), **details)

    @property
    def current(self) -> str:
        return str(self._values.get("phase", "starting"))

    def update(self, **values: Any) -> None:
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
    return status


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
            rows.append((label, form.format(status[key])))
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
    rows.append(("last checkpoint", status["last_checkpoint"] or "none yet"))
    return rows


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
