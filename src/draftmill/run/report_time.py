"""How long a run was in which phase, from the times in its files.

All times are in seconds since 1970, by the clock of the machine that ran.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

ORDER = {"loading": 0, "compiling": 1, "training": 2, "checking": 3, "finished": 4, "stopped": 4, "failed": 4}
END = 4

Mark = tuple[float, str]  # when a phase began, and which


@dataclass(frozen=True, slots=True)
class Span:
    """A time in one phase."""

    phase: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def phase_marks(events: Sequence[tuple[float, str, bool]]) -> list[Mark]:
    """When the run's phases began. events: (time, text, whether it is a worker's) of the phase events.

    A worker that begins `checking` takes the run with it; its other phases are its own.
    """
    marks = []
    for t, text, of_worker in events:
        phase = text.partition(":")[0]
        if phase in ORDER and (not of_worker or phase == "checking"):
            marks.append((t, phase))
    return sorted(marks)


def phase_spans(marks: Sequence[Mark], signs: Sequence[float], end: float | None) -> list[Span]:
    """Phases one after another, each up to the next. A phase that a kill ended lasts until the run's last sign of life.

    signs: times of all lines of all files, sorted. end: for a run that has not ended, when it was last heard of.
    """
    spans = []
    for place, (start, phase) in enumerate(marks):
        if ORDER[phase] == END:
            continue
        if place + 1 == len(marks):
            stop = max([*signs[-1:], start if end is None else end])
        else:
            stop, following = marks[place + 1]
            if ORDER[following] <= ORDER[phase]:  # another session: this one ended without a word
                stop = signs[max(0, bisect.bisect_left(signs, stop) - 1)] if signs else start
        spans.append(Span(phase, start, max(start, stop)))
    return spans


def active_seconds(spans: Sequence[Span], until: float) -> float:
    """Time within the spans up to a moment."""
    return sum(max(0.0, min(until, span.end) - span.start) for span in spans)


def budget(spans: Sequence[Span], saving_seconds: float) -> list[tuple[str, float]]:
    """(what, seconds), adding up to the time from the first sign to the last. Saving is part of training."""
    totals = dict.fromkeys(("loading", "compiling", "training", "saving", "checking", "between"), 0.0)
    for span in spans:
        totals[span.phase] += span.seconds
    totals["saving"] = min(saving_seconds, totals["training"])
    totals["training"] -= totals["saving"]
    pairs = itertools.pairwise(spans)
    totals["between"] = sum(max(0.0, after.start - before.end) for before, after in pairs)
    return [(what, seconds) for what, seconds in totals.items() if seconds > 0]
