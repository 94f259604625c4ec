"""Where a run is: written by the run as it goes, read by `draftmill status` and `watch` from files alone."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from draftmill.errors import UserError
from draftmill.run.activity import STEADY
from draftmill.run.console import say
from draftmill.run.events import EventLog, tail
from draftmill.run.files import RunFolder, write_atomically
from draftmill.run.findings import drops_of, recompiled, saving_share, trends, unresolved
from draftmill.run.held_back import held_back_by
from draftmill.run.usual import MEASURED, Kind, by_rule, machine, record, usual

ENDED = ("finished", "stopped", "failed")
PHASES = ("starting", "loading", "compiling", "training", "checking", *ENDED)
EXIT_CODES = {"running": 0, "finished": 0, "stopped": 3, "failed": 4, "died": 4}
WAIT_SECONDS = 0.2
HISTORY = 400  # log lines kept for the curves of the live view
CURVES = ("step", "loss", "tau_teacher_forced", "tokens_per_second", "waits", "time")

Row = dict[str, Any]


class StatusWriter:
    """The run's own account of itself. Each write replaces the file as a whole; any thread may write.

    facts: keys of the status that are known from the start, such as `devices`. started: now, if it is left out.
    target: of the run; then phases are compared with what they usually take on this machine, and are remembered for
    the runs to come.
    """

    def __init__(
        self,
        folder: RunFolder,
        total_steps: int | None = None,
        *,
        target: str | None = None,
        started: float | None = None,
        **facts: Any,
    ) -> None:
        self._path, self._target = folder.status, target
        self._role = f"run on {facts.get('devices')}"
        self._events = EventLog(folder.events)
        self._writing = threading.RLock()
        now = time.time()
        began = round(started or now, 6)  # as events have it: none of this session may seem to be older
        self._values: Row = {
            "pid": os.getpid(), "started": began, "phase": "starting", "since": began, "updated": now, "times": {},
            "total_steps": total_steps, **facts,
        }  # fmt: skip
        self._usual: dict[str, tuple[str, float | None, str | None]] = {}  # worker, or "" for the run → of its phase
        self._rows: deque[Row] = deque(maxlen=HISTORY)

    def phase(self, name: str, **details: Any) -> None:
        """Enter a phase of the run: one of `PHASES`."""
        with self._writing:
            now, old = time.time(), self._values
            reason = f": {details['reason']}" if details.get("reason") else ""
            self._events.add("phase", f"{name}{reason}", step=details.get("step", old.get("step")))
            seconds = now - old["since"]
            times = {**old["times"], old["phase"]: round(old["times"].get(old["phase"], 0.0) + seconds, 3)}
            if name not in ("stopped", "failed"):
                self._remember(old["phase"], self._role, "cpu", seconds)
            expected = self._expect("", name, self._role, "cpu")
            self.update(phase=name, since=now, times=times, **expected, **details)

    @property
    def current(self) -> str:
        return str(self._values["phase"])

    def update(self, **values: Any) -> None:
        """Change values; the file is there when this returns. loss among them: they are a log line's."""
        with self._writing:
            now = time.time()
            if "workers" in values:
                values["workers"] = {name: self._worker(name, worker) for name, worker in values["workers"].items()}
            self._values.update(values, updated=now)
            if "loss" in values:
                self._logged(values, now)
            if self._values.get("steady_since") is None and self._is_steady("loss" in values):
                self._values["steady_since"] = now
            write_atomically(self._path, json.dumps(self._values))

    def saved(self, seconds: float) -> None:
        """A checkpoint took so long."""
        with self._writing:
            times = self._values["times"]
            self.update(times={**times, "saving": round(times.get("saving", 0.0) + seconds, 3)})

    def snapshot(self) -> tuple[Row, list[Row]]:
        """All values, and the log lines of this session as rows of metrics.jsonl have them."""
        with self._writing:
            return dict(self._values), list(self._rows)

    def _worker(self, name: str, worker: Row) -> Row:
        """An entry with what is usual for its phase. A change of phase is an event, and a duration to remember."""
        old = self._values.get("workers", {}).get(name, {})
        role = name.partition("-")[0]
        device = str(worker.get("device", "cpu"))
        if worker["phase"] != old.get("phase"):
            if not (worker["phase"] in STEADY and old.get("phase") in STEADY):  # a wait between two batches is none
                self._events.add("phase", worker["phase"], worker=name, pid=worker["pid"])
            if old.get("pid") == worker["pid"]:
                self._remember(old["phase"], role, device, worker["since"] - old["since"])
        return {**worker, **self._expect(name, worker["phase"], role, device)}

    def _remember(self, phase: str, role: str, device: str, seconds: float) -> None:
        if self._target is not None and phase in MEASURED and seconds > 0:
            record(Kind(phase, role, self._target, machine(device)), seconds)

    def _expect(self, name: str, phase: str, role: str, device: str) -> Row:
        """Looked up once, when the phase begins."""
        if self._usual.get(name, ("",))[0] != phase:
            seconds, source = None, None
            if self._target is not None and phase in MEASURED:
                seconds = usual(Kind(phase, role, self._target, machine(device)))
                source = None if seconds is None else "earlier runs"
                if seconds is None:
                    seconds, source = by_rule(phase, role, self._target) or (None, None)
            self._usual[name] = (phase, None if seconds is None else round(seconds, 1), source)
        return {"usual_seconds": self._usual[name][1], "usual_from": self._usual[name][2]}

    def _logged(self, values: Row, now: float) -> None:
        self._values["logged"] = now
        row: Row = {**values, "tau_teacher_forced": values.get("tau"), "time": now}
        while self._rows and (self._rows[-1]["step"] or 0) >= (values.get("step") or 0):  # it went back to a checkpoint
            self._rows.pop()
        self._rows.append({key: row.get(key) for key in CURVES})

    def _is_steady(self, logs: bool) -> bool:
        """A drafter has trained its first batch: start-up is over."""
        if self.current != "training":
            return False
        workers = self._values.get("workers", {}).items()
        return logs or any(name.startswith(("drafter", "main")) and w["phase"] == "working" for name, w in workers)


def read_status(root: Path) -> Row:
    """The status of a run folder, with all that is worked out when it is asked for. From files alone, each of which may
    be missing or cut. UserError where there is no run."""
    folder = RunFolder(root)
    values, holder = read_object(folder.status), folder.holder()
    if holder is not None and values.get("pid") != holder:  # a new session, which has not got to writing yet
        since = folder.locked_since()
        values = {"pid": holder, "since": since, "started": since, "updated": since}
    elif not values and not folder.status.exists():
        raise UserError(f"{root} holds no run (no status.json); give the run_dir of a run")
    elif not values:
        values = {"reason": f"{folder.status} cannot be read, so how the run ended is unknown"}
    alive = holder is not None
    return complete(values, folder, rows=tail(folder.metrics), events=tail(folder.events), alive=alive)


def complete(values: Row, folder: RunFolder, *, rows: list[Row], events: list[Row], alive: bool) -> Row:
    """The values of status.json and what follows from them and the other files. rows: of metrics.jsonl."""
    now = time.time()
    blank = dict.fromkeys(("pid", "step", "total_steps", "steady_since", "load", "waits", "slots", "slots_in_use"))
    status = {**blank, "phase": "starting", "since": now, "updated": now, "started": now, "workers": {}, **values}
    status["state"] = status["phase"] if status["phase"] in ENDED else "running" if alive else "died"
    steady = status["steady_since"]
    status["start_up_seconds"] = None if steady is None else round(steady - status["started"], 1)
    status.update(last_checkpoint(folder))
    status["trends"] = trends(rows)
    status["stalled"] = [f"{name}, {w['stalled']}" for name, w in status["workers"].items() if w.get("stalled")]
    since_start = [event for event in events if event.get("time", 0.0) >= status["started"]]
    status["warnings"] = unresolved(since_start)
    status["dropped_rows"] = drops_of(status.get("data"))
    status["saving_share"] = saving_share(since_start, steady, status["updated"])
    status["recompiled"] = recompiled(since_start, status["updated"])
    status["held_back_by"] = held_back_by(status)
    return status


def has_begun(root: Path) -> bool:
    """Whether there is a run that `read_status` can tell of."""
    folder = RunFolder(root)
    return folder.status.exists() or folder.is_locked()


def read_object(path: Path) -> Row:
    """A JSON object; {} for what is missing or is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def last_checkpoint(folder: RunFolder) -> Row:
    """Newest checkpoint folder, when it was written, and its size."""
    for manifest in sorted(folder.checkpoints.glob("step-*/manifest.json"), reverse=True):
        try:
            size = sum(path.stat().st_size for path in manifest.parent.iterdir())
            written = manifest.stat().st_mtime
        except FileNotFoundError:  # it was tidied away meanwhile
            continue
        path = str(manifest.parent)
        return {"last_checkpoint": path, "last_checkpoint_time": written, "checkpoint_bytes": size}
    return dict.fromkeys(("last_checkpoint", "last_checkpoint_time", "checkpoint_bytes"))


def wait_for_phase(root: Path, phase: str) -> Row:
    """Return the status once the run is in `phase`, or has ended in whatever way. Also waits for a run that is yet to
    begin, which is said. UserError for an unknown phase."""
    if phase not in PHASES:
        raise UserError(f"--wait {phase}: no such phase; phases are {', '.join(PHASES)}")
    if not has_begun(root):
        say(f"no run in {root} yet; waiting for one (Ctrl-C ends this)")
    while not has_begun(root):
        time.sleep(WAIT_SECONDS)
    while True:
        status = read_status(root)
        if status["phase"] == phase or status["state"] != "running":
            return status
        time.sleep(WAIT_SECONDS)
