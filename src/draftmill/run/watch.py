"""`draftmill watch`: the status of a run, live. Reads files only; the run knows nothing of it."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from draftmill.run.events import tail
from draftmill.run.files import RunFolder
from draftmill.run.status import EXIT_CODES, has_begun, read_status
from draftmill.run.status_view import lines_of_status
from draftmill.run.words import duration

SECONDS = 1.0
BARS = "▁▂▃▄▅▆▇█"
CURVES = (("loss", "loss"), ("tau_teacher_forced", "τ"), ("tokens_per_second", "tokens/s"), ("slots_in_use", "queue"))
BESIDE = 32  # columns of a curve's name and ends

Row = dict[str, Any]


def watch(root: Path) -> int:
    """Show the run until it ends, also one that is yet to begin; returns the exit code that `status` would have."""
    console, began = Console(), time.time()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            status = read_status(root) if has_begun(root) else None
            if status is None:
                live.update(_waiting(root, time.time() - began), refresh=True)
            else:
                rows = tail(RunFolder(root).metrics)
                live.update(view(status, rows, console.width, console.height), refresh=True)
                if status["state"] != "running":
                    return EXIT_CODES[status["state"]]
            time.sleep(SECONDS)


def view(status: Row, rows: list[Row], width: int, height: int) -> RenderableType:
    """The status table, and below it the curves of the last lines of metrics, as far as the terminal has room."""
    shown = lines_of_status(status, time.time(), width, height)
    curves = _curves(rows, width)[: max(0, height - len(shown.lines) - 1)]
    return Group(shown, Text(), *curves) if curves else shown


def sparkline(values: list[float], width: int) -> str:
    """At most `width` bars, each the mean of its share of the values, between their least and their largest."""
    count = min(width, len(values))
    edges = [round(len(values) * n / count) for n in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * count
    return "".join(BARS[round((mean - low) / (high - low) * (len(BARS) - 1))] for mean in means)


def _curves(rows: list[Row], width: int) -> list[Text]:
    lines = []
    for key, name in CURVES:
        values = [float(value) for row in rows if (value := {**row, **(row.get("waits") or {})}.get(key)) is not None]
        if len(values) > 1:
            curve = sparkline(values, max(10, width - BESIDE))
            lines.append(Text(f"{name:>8} {_short(min(values)):>8} … {_short(max(values)):>8}  {curve}"))
    return lines


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _waiting(root: Path, seconds: float) -> Text:
    return Text(f"no run in {root} yet; waiting for one for {duration(seconds)} (Ctrl-C ends this)")
