"""What the last lines of metrics.jsonl and events.jsonl say about a run."""

from __future__ import annotations

import math
import re
import statistics
from typing import Any

Row = dict[str, Any]

TREND_LINES = 80
WINDOW_SECONDS = 3600.0  # over which the share of saving is taken
RECOMPILED_SECONDS = 600.0
WARNINGS = 5  # newest kinds


def trends(rows: list[Row]) -> dict[str, str]:
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


def unresolved(events: list[Row]) -> list[Row]:
    """Warnings, and stalls that did not end: the newest kinds, oldest first, each its newest event with `times`.

    Two are of one kind when their texts differ in numbers only. A stall is over when its worker moves or is restarted.
    """
    found: dict[str, Row] = {}
    for event in events:
        kind, text = event.get("kind"), str(event.get("text", ""))
        if kind in ("moving", "restart"):
            found.pop(f"stalled {event.get('worker')}", None)
        elif kind in ("warning", "stalled"):
            key = f"stalled {event.get('worker')}" if kind == "stalled" else re.sub(r"\d+", "#", text)
            before = found.pop(key, {})
            found[key] = {**event, "times": before.get("times", 0) + 1}
    return list(found.values())[-WARNINGS:]


def saving_share(events: list[Row], steady_since: float | None, until: float) -> float | None:
    """Share of the steady time spent writing checkpoints, over the last hour at most; None without two of them."""
    if steady_since is None or not events:
        return None
    first = max(steady_since, until - WINDOW_SECONDS, events[0].get("time", 0.0))
    saves = [e for e in events if e.get("kind") == "checkpoint" and e.get("time", 0.0) >= first]
    if len(saves) < 2 or until <= first:
        return None
    seconds = sum(float(event.get("seconds") or 0.0) for event in saves)
    return float(min(1.0, seconds / (until - first)))


def steady_tokens_per_second(rows: list[Row], events: list[Row]) -> float | None:
    """Of all steady steps: from the first of the lines to the last, without the time spent saving. None while there are
    not two lines. rows: of one session."""
    rows = [row for row in rows if row.get("context_tokens") is not None and row.get("time") is not None]
    if len(rows) < 2:
        return None
    first, last = rows[0], rows[-1]
    saves = [e for e in events if e.get("kind") == "checkpoint" and first["time"] < e.get("time", 0.0) < last["time"]]
    seconds = last["time"] - first["time"] - sum(float(event.get("seconds") or 0.0) for event in saves)
    return float((last["context_tokens"] - first["context_tokens"]) / seconds) if seconds > 0 else None


def recompiled(events: list[Row], until: float) -> int:
    """Compilations after warm-up, in the ten minutes before `until`."""
    return sum(e.get("kind") == "recompiled" and e.get("time", 0.0) >= until - RECOMPILED_SECONDS for e in events)


def drops_of(data: Row | None) -> int | None:
    """Rows that the data set lost when it was prepared; None where that is not known."""
    return None if data is None else int(data["rows"]) - int(data["kept_rows"])
