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
    """When the run's phases began. events: (time, text, whether it is a worker's) of the phase events."""
    own = [(t, text.partition(":")[0]) for t, text, of_worker in sorted(events) if not of_worker]
    return [(t, phase) for t, phase in own if phase in ORDER]


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


def within(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """Seconds that both have in common."""
    return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in spans for b in others)


def worker_spans(events: Sequence[tuple[float, str, str]], spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Each process' own phases. events: (time, phase, process). spans: of the run; a phase ends with its session."""
    pairs = itertools.pairwise(spans)
    ends = [before.end for before, after in pairs if ORDER[after.phase] <= ORDER[before.phase]] + [spans[-1].end]
    found: dict[str, list[Span]] = {}
    for name in sorted({name for _, _, name in events}):
        own = sorted((t, phase) for t, phase, other in events if other == name)
        for (start, phase), following in itertools.zip_longest(own, own[1:]):
            last = next((end for end in ends if end >= start), ends[-1])
            end = last if following is None else min(following[0], last)
            found.setdefault(name, []).append(Span(phase, start, max(start, end)))
    return found


def budget(
    spans: Sequence[Span], saving_seconds: float, waiting_seconds: float = 0.0, drafter: Sequence[Span] = ()
) -> list[tuple[str, float]]:
    """(what, seconds), adding up to the time from the first sign to the last. Saving, waiting, and what the drafter's
    process did before its first batch was done, are parts of training. drafter: that process' own phases."""
    totals = dict.fromkeys(
        ("loading", "compiling", "warming up", "training", "waiting", "saving", "checking", "between"), 0.0
    )
    for span in spans:
        totals[span.phase] += span.seconds
    training = [span for span in spans if span.phase == "training"]
    parts = {"saving": saving_seconds, "waiting": waiting_seconds}
    for phase in ("compiling", "warming up"):
        parts[phase] = within(training, [span for span in drafter if span.phase == phase])
    for part, seconds in parts.items():
        taken = min(seconds, totals["training"])
        totals[part] += taken
        totals["training"] -= taken
    pairs = itertools.pairwise(spans)
    totals["between"] = sum(max(0.0, after.start - before.end) for before, after in pairs)
    return [(what, seconds) for what, seconds in totals.items() if seconds > 0]
