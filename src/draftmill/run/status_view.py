"""A run's status as people read it: an overview, a table of its processes, and one line for a log."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from draftmill.run.words import duration, gigabytes

Row = dict[str, Any]

NUMBERS = (
    ("loss", "loss", "{:.3f}"),
    ("tau", "τ (teacher-forced)", "{:.2f}"),
    ("tokens_per_second", "context tokens/s", "{:,.0f}"),
)
STYLES = {"STALLED": "bold red", "warning": "yellow", "throttled": "yellow", "held back by": "bold"}
QUIET_SECONDS = 5.0  # without progress, from which on it is said
STALE_SECONDS = 60.0  # a time left that is older says how old it is
SELDOM = ("start-up", "dropped rows", "host", "last checkpoint")
WIDE = 110  # columns of a terminal that also shows process numbers


class StatusTable:
    """`describe` and the processes, as wide as the terminal is. short: 0, all of it; 1, processes that do alike in one
    line; 2, also without what changes rarely."""

    def __init__(self, status: Row, now: float, short: int = 0) -> None:
        self.status, self.now, self.short = status, now, short

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = Table(show_header=False, box=None)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        rows = describe(self.status, self.now)
        processes = self.status["state"] == "running" and self.status["workers"]
        if processes and self.short:
            rows += [("processes" if n == 0 else "", text) for n, text in enumerate(_groups(self.status))]
        for name, text in rows:
            if self.short < 2 or name not in SELDOM:
                grid.add_row(Text(name, STYLES.get(name, "")), Text(text, STYLES.get(name, "")))
        yield grid
        if processes and not self.short:
            yield Text()
            yield _processes(self.status, self.now, options.max_width)


def table(status: Row, now: float) -> StatusTable:
    """The status as it is shown."""
    return StatusTable(status, now)


class Lines:
    """Rendered before, as drawing twice would cost twice."""

    def __init__(self, lines: list[list[Segment]]) -> None:
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            yield from line
            yield Segment.line()


def lines_of_status(status: Row, now: float, width: int, height: int) -> Lines:
    """The status in as many lines as there are, or in as few as it needs at least."""
    console = Console(width=width)
    for short in range(3):
        lines = console.render_lines(StatusTable(status, now, short), pad=False)
        if len(lines) <= height:
            break
    return Lines(lines)


def describe(status: Row, now: float) -> list[tuple[str, str]]:
    """Rows of the overview: what stands still comes first."""
    return [*_first(status, now), *_progress(status, now), *_flow(status), *_machine(status), *_last(status, now)]


def headline(status: Row, now: float) -> str:
    """One line of what goes on, for a log in which nothing was said for a while."""
    stalled = "".join(f"; stalled: {stall}" for stall in status["stalled"])
    if status["phase"] == "training" and status["steady_since"] is not None and status["step"] is not None:
        return f"still training: step {_steps(status)}{stalled}"
    seconds = now - status["since"]
    workers = "; ".join(_groups(status)) or None
    usual = _usual(status) or next((text for w in status["workers"].values() if (text := _usual(w))), "")
    return f"still {status['phase']}, {duration(seconds)}{usual}{'' if workers is None else f': {workers}'}{stalled}"


def _first(status: Row, now: float) -> Iterator[tuple[str, str]]:
    if status["state"] == "running":
        for stall in status["stalled"]:
            yield "STALLED", stall
    yield "state", _state_line(status, now)
    if status.get("reason"):
        yield "reason", str(status["reason"])
    if status["held_back_by"]:
        yield "held back by", status["held_back_by"]


def _progress(status: Row, now: float) -> Iterator[tuple[str, str]]:
    if status.get("step") is not None:
        yield "step", _steps(status)
    for key, label, form in NUMBERS:
        if status.get(key) is not None:
            trend = status["trends"].get({"tau": "tau_teacher_forced"}.get(key, key))
            yield label, form.format(status[key]) + (f" ({trend})" if trend else "")
    if status["state"] == "running" and status["phase"] == "training":
        yield "time left", _time_left(status, now)
    if status.get("start_up_seconds") is not None:
        yield "start-up", f"{duration(status['start_up_seconds'])} until the first batch was trained"
    if status["state"] != "running" and status.get("times"):
        yield "time", times_line(status)


def times_line(status: Row) -> str:
    """Where this session's time went: start-up apart from the steady state, saving apart from training."""
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in split_times(status))


def split_times(status: Row) -> list[tuple[str, float]]:
    """(what, seconds) of this session's phases that are over; together, they are its time."""
    times, steady = dict(status.get("times") or {}), status.get("steady_since")
    training, saving = times.pop("training", None), times.pop("saving", 0.0)
    rows = [(name, times.pop(name)) for name in ("starting", "loading", "compiling") if name in times]
    if training is not None:
        start_up = steady - status["started"] - sum(seconds for _, seconds in rows) if steady is not None else training
        first = min(training, max(0.0, start_up))
        saving = min(saving, training - first)
        rows += [("first batch", first), ("steady", training - first - saving), ("saving", saving)]
    rows += [(name, seconds) for name, seconds in times.items() if name == "checking"]
    return [(name, seconds) for name, seconds in rows if seconds >= 0.5]


def _flow(status: Row) -> Iterator[tuple[str, str]]:
    """Which side waits for the other, and what was lost or began anew."""
    if status["state"] == "running":
        waits = status.get("waits") or {}
        shares = [f"{side} {waits[f'{side}_wait']:.0%}" for side in ("targets", "drafters") if _known(waits, side)]
        if shares:
            yield "time waited", ", ".join(shares)
        if status.get("slots") and status.get("slots_in_use") is not None:
            yield "queue", f"{status['slots_in_use']} of {status['slots']} slots in use"
    if status.get("restarts"):
        yield "restarts", str(status["restarts"])
    if status.get("skipped"):
        yield "skipped updates", f"{status['skipped']} (non-finite gradients)"
    if status.get("dropped_rows"):
        yield "dropped rows", f"{status['dropped_rows']:,} of {status['data']['rows']:,} of the data set"


def _machine(status: Row) -> Iterator[tuple[str, str]]:
    load = status.get("load") or {}
    if status["state"] != "running" or not load:
        return
    for device in load.get("devices") or []:
        if reasons := device.get("throttled"):
            yield "throttled", f"{device['device']}: {', '.join(reasons)}"
    if host := load.get("host"):
        busy = [device["utilisation"] for device in load.get("devices") or [] if device["device"] == "cpu"]
        cpu = f"CPU {busy[0]:.0%} busy; " if busy else ""
        memory = f"{gigabytes(host['memory_used'])} of {gigabytes(host['memory_total'])}"
        disk = f"disk {gigabytes(host['disk_free'])} free"
        yield "host", f"{cpu}{gigabytes(host['own_rss'])} by this run, {memory} by all; {disk}"


def _last(status: Row, now: float) -> Iterator[tuple[str, str]]:
    if check := status.get("decode_check"):
        verdict = "WARNING: training and decoding disagree" if check["flagged"] else "training and decoding agree"
        yield "decode check", f"τ {check['tau_decoded']:.2f}; {verdict}"
    for event in status["warnings"]:
        if event["kind"] == "warning" or status["state"] != "running":  # a stall that goes on stands at the top
            yield "warning", warning_line(event, now)
    written = status.get("last_checkpoint_time")
    age = "" if written is None else f" ({duration(now - written)} ago)"
    yield "last checkpoint", f"{status['last_checkpoint']}{age}" if status["last_checkpoint"] else "none yet"


def warning_line(event: Row, now: float) -> str:
    times = f", {event['times']} times" if event["times"] > 1 else ""
    stalled = "stalled: " if event["kind"] == "stalled" else ""
    return f"{duration(now - event['time'])} ago{times}: {stalled}{event['text']}"


def _state_line(status: Row, now: float) -> str:
    state, phase = status["state"], status["phase"]
    ago = duration(now - status["since"])
    if state == "running":
        return f"running: {phase} for {ago}{_usual(status)} (process {status['pid']})"
    if state == "died":
        silent = duration(now - status["updated"])
        return f"died while {phase} (last heard {silent} ago); go on with `draftmill train … --resume`"
    return f"{state} {ago} ago"


def _steps(status: Row) -> str:
    step, total = status["step"], status.get("total_steps")
    return f"{step:,} of {total:,} ({step / total:.0%})" if total else f"{step:,}"


def _time_left(status: Row, now: float) -> str:
    eta, logged = status.get("eta_seconds"), status.get("logged")
    if eta is None:
        return "estimating"
    age = now - logged if logged is not None else 0.0
    return duration(eta) + (f", as of {duration(age)} ago" if age > STALE_SECONDS else "")


def _usual(entry: Row) -> str:
    """, usually 1 min 00 s"""
    if (seconds := entry.get("usual_seconds")) is None:
        return ""
    if entry.get("usual_from") == "earlier runs":
        return f", usually {duration(seconds)}"
    return f", about {duration(seconds)} for {entry.get('usual_from')}"


def _known(waits: Row, side: str) -> bool:
    return waits.get(f"{side}_wait") is not None


# --- processes


GAP = 2  # columns between two


def _processes(status: Row, now: float, width: int) -> Table:
    """A line for each process, and the load of its GPU; what it does gets the room that is left."""
    workers = status["workers"]
    load = {device["device"]: device for device in (status.get("load") or {}).get("devices") or []}
    columns = {
        "process": list(workers),
        "phase": [worker["phase"] for worker in workers.values()],
        "for": [_phase_time(worker, now) for worker in workers.values()],
    }
    if any(
        str(worker.get("device")).startswith("cuda") for worker in workers.values()
    ):  # the host's load is told apart
        devices = columns["device"] = [str(worker.get("device")) for worker in workers.values()]
        columns["busy"], columns["memory"] = map(
            list, zip(*(_load(load.get(name, {})) for name in devices), strict=True)
        )
    if width >= WIDE:
        columns["pid"] = [str(worker["pid"]) for worker in workers.values()]
    taken = sum(max(map(len, [heading, *cells])) + GAP for heading, cells in columns.items())
    columns["doing"] = [_cut(_doing(worker, now), width - taken) for worker in workers.values()]
    grid = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))
    for heading in columns:
        grid.add_column(heading, no_wrap=True, justify="right" if heading in ("busy", "memory", "pid") else "left")
    for cells, worker in zip(zip(*columns.values(), strict=True), workers.values(), strict=True):
        grid.add_row(*map(Text, cells), style="bold red" if worker.get("stalled") else "")
    return grid


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _phase_time(worker: Row, now: float) -> str:
    seconds = now - worker["since"]
    return (
        f"{seconds:.0f} s"
        if seconds < 60
        else f"{seconds / 60:.0f} min"
        if seconds < 3600
        else f"{seconds / 3600:.1f} h"
    )


def _doing(worker: Row, now: float) -> str:
    moved = worker.get("moved") or 0.0
    quiet = moved > worker["since"] + 1 and now - moved > QUIET_SECONDS  # else the phase is as long without progress
    still = f"no progress for {duration(now - moved)}" if quiet else ""
    parts = (worker.get("doing") or "", _usual(worker).removeprefix(", "), still)
    return ", ".join(part for part in parts if part)


def _load(device: Row) -> tuple[str, str]:
    busy, used, total = device.get("utilisation"), device.get("memory_used"), device.get("memory_total")
    memory = f"{used / 1e9:.0f}/{total / 1e9:.0f} GB" if used is not None and total else ""
    return "" if busy is None else f"{busy:.0%}", memory


def _groups(status: Row) -> Iterator[str]:
    """Processes in the same phase together, with what the first does: target-0 … target-4 loading, 43%."""
    for phase, group in groupby(status["workers"].items(), key=lambda item: item[1]["phase"]):
        names, workers = zip(*group, strict=True)
        who = f"{names[0]} … {names[-1]}" if len(names) > 2 else ", ".join(names)
        doing = workers[0].get("doing")
        yield f"{who} {phase}{f', {doing}' if doing else ''}"
