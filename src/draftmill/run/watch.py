"""`draftmill watch`: the status of a run, live. Reads files only; the run knows nothing of it."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from draftmill.run.events import tail
from draftmill.run.files import RunFolder
from draftmill.run.status import EXIT_CODES, read_status, table

SECONDS = 1.0
BARS = "▁▂▃▄▅▆▇█"
CURVES = (("loss", "loss"), ("tau_teacher_forced", "τ"), ("tokens_per_second", "tokens/s"))


def watch(root: Path) -> int:
    """Show the run until it ends; returns the exit code that `status` would have."""
    console = Console()
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            status = read_status(root)
            live.update(view(status, tail(RunFolder(root).metrics), console.width))
            if status["state"] != "running":
                return EXIT_CODES[status["state"]]
            time.sleep(SECONDS)


def view(status: dict[str, Any], rows: list[dict[str, Any]], width: int) -> Group:
    """The status table, and below it the curves of the last lines of metrics."""
    lines = []
    for key, name in CURVES:
        values = [float(row[key]) for row in rows if row.get(key) is not None]
        if len(values) > 1:
            curve = sparkline(values, max(10, width - 40))
            lines.append(Text(f"{name:>10} {min(values):10,.3g} … {max(values):10,.3g}  {curve}"))
    return Group(table(status, time.time()), *lines)


def sparkline(values: list[float], width: int) -> str:
    """At most `width` bars, each the mean of its share of the values, between their least and their largest."""
    count = min(width, len(values))
    edges = [round(len(values) * n / count) for n in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * count
    return "".join(BARS[round((mean - low) / (high - low) * (len(BARS) - 1))] for mean in means)
