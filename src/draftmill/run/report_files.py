"""A run as its files tell it, for the report.

The run may be going on, finished or dead, so any file may be missing or end in the middle of a line, and none of them
is trusted: a value that is not what it should be counts as missing.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from draftmill.errors import UserError
from draftmill.run.files import RunFolder
from draftmill.run.report_time import Span, active_seconds, budget, phase_marks, phase_spans, worker_spans
from draftmill.run.status import ENDED

Row = Mapping[str, Any]

LARGEST = 1e100  # beyond it a number is nonsense and would only break the axes
LAST_SHARE = 20  # "the last twentieth" of the lines


@dataclass(slots=True)
class Ledger:
    """What ledger.jsonl says. makers: for each trained batch the target that computed it, "" where it does not say.
    repeated: batches that count more than once: none, in a sound run. rewinds: (first batch that was trained again,
    reason, time). last: time of the last line. In seconds since 1970."""

    makers: dict[int, str] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)
    rewinds: list[tuple[int, str, float | None]] = field(default_factory=list)
    last: float | None = None

    def trained(self, index: int, target: str) -> None:
        if index in self.makers:
            self.repeated.add(index)
        self.makers[index] = sys.intern(target)

    def rewind(self, first: int) -> None:
        """What was trained from here on is not part of the drafter."""
        self.makers = {index: target for index, target in self.makers.items() if index < first}
        self.repeated = {index for index in self.repeated if index < first}


@dataclass(frozen=True, slots=True)
class Run:
    """One run as its files tell it.

    rows: lines of metrics.jsonl with a step, in order. seconds: for each of them the time in training until then, or
    None where it has none. starts: rows that are the first behind a start, a resumption or a return to a checkpoint.
    spans: phases by events.jsonl, none where there is no such file. config: dotted key → value. now: when it was read.
    """

    label: str
    root: Path
    now: float
    state: str
    status: Row
    rows: list[Row]
    seconds: list[float | None]
    starts: list[int]
    spans: list[Span]
    events: list[Row]
    ledger: Ledger
    config_text: str
    config: dict[str, Any]
    record: Row
    evaluation: Row | None
    checkpoints: list[tuple[int, float]]

    @property
    def total_steps(self) -> int | None:
        return whole(self.status, "total_steps")

    @property
    def step(self) -> int | None:
        """Finished steps: of the last line, or of the status, which knows of steps that were not logged."""
        known = [s for s in (whole(self.status, "step"), whole(self.rows[-1], "step") if self.rows else None) if s]
        return max(known) if known else whole(self.status, "step")

    @property
    def training_seconds(self) -> float | None:
        """In training, saving included, stops excluded."""
        if self.spans:
            return sum(span.seconds for span in self.spans if span.phase == "training")
        return self.seconds[-1] if self.seconds else None

    @property
    def saving_seconds(self) -> float:
        return sum(number(event, "seconds") or 0.0 for event in self.events if event.get("kind") == "checkpoint")

    @property
    def waiting_seconds(self) -> float:
        """That the drafters waited for batches: of each line's interval the share that the line says."""
        starts, total = set(self.starts), 0.0
        for place in range(1, len(self.rows)):
            before, now, waits = self.seconds[place - 1], self.seconds[place], self.rows[place].get("waits")
            share = number(waits, "drafters_wait") if isinstance(waits, dict) else None
            if place not in starts and before is not None and now is not None and share is not None:
                total += max(0.0, now - before) * min(1.0, max(0.0, share))
        return total

    @property
    def by_process(self) -> dict[str, list[Span]]:
        """Phases of each process, by its name."""
        known = [
            (t, str(e.get("text")).partition(":")[0], str(e["worker"]))
            for e in self.events
            if e.get("kind") == "phase" and "worker" in e and (t := number(e, "time")) is not None
        ]
        return worker_spans(known, self.spans) if known and self.spans else {}

    @property
    def budget(self) -> list[tuple[str, float]]:
        """Where the time went; empty where events.jsonl does not say."""
        own = self.by_process
        drafter = own.get("main") or own.get("drafter-0") or []
        return budget(self.spans, self.saving_seconds, self.waiting_seconds, drafter) if self.spans else []

    @property
    def slices(self) -> list[Row]:
        """Of the evaluation: all prompts first, then each source."""
        found = self.evaluation.get("slices") if self.evaluation else None
        return [part for part in found if isinstance(part, dict)] if isinstance(found, list) else []

    @property
    def evaluated_tau(self) -> float | None:
        acceptance = self.slices[0].get("acceptance") if self.slices else None
        return number(acceptance, "tau") if isinstance(acceptance, dict) else None

    @property
    def restarts(self) -> int:
        """Times the training began again: resumptions and returns to a checkpoint."""
        return sum(index > 0 for index in self.starts)

    def column(self, key: str) -> list[float | None]:
        return [number(row, key) for row in self.rows]

    def last(self, key: str) -> float | None:
        return number(self.rows[-1], key) if self.rows else None

    def last_twentieth(self, key: str) -> float | None:
        """Mean over the lines of the last twentieth that have a value; at least one line."""
        return mean([number(row, key) for row in self._tail()])

    def slots(self, key: str) -> list[float | None]:
        """The same of each slot of a list."""
        lists = [numbers(row, key) for row in self._tail()]
        width = max(map(len, lists), default=0)
        return [mean([values[slot] for values in lists if slot < len(values)]) for slot in range(width)]

    def steady_tokens_per_second(self) -> tuple[float | None, int]:
        """Median of the lines since the last start that has any, and their number."""
        bounds = [*self.starts, len(self.rows)] if self.starts[:1] == [0] else [0, *self.starts, len(self.rows)]
        rates = self.column("tokens_per_second")
        for first, end in reversed(list(itertools.pairwise(bounds))):
            if known := sorted(rate for rate in rates[first:end] if rate is not None):
                middle = len(known) // 2
                return (known[middle] + known[-1 - middle]) / 2, len(known)
        return None, 0

    def _tail(self) -> list[Row]:
        return self.rows[-max(1, len(self.rows) // LAST_SHARE) :]


def read_run(root: Path, label: str, now: float) -> Run:
    """Whatever the folder's files say at this moment."""
    folder = RunFolder(root)
    if not folder.status.is_file() and not folder.metrics.is_file():
        raise UserError(f"{root} holds no run (neither status.json nor metrics.jsonl); give the run_dir of a run")
    status = read_object(folder.status, json.loads)
    rows = in_order(read_lines(folder.metrics))
    events, ledger = list(read_lines(folder.events)), read_ledger(folder.ledger)
    state = state_of(status, folder)
    spans = _spans(events, ledger, rows, now if state == "running" else number(status, "updated"))
    starts = [index for index, row in enumerate(rows) if row.get("tokens_per_second", 0.0) is None]
    config = flat(read_object(folder.config, yaml.safe_load))
    checkpoints = sorted(_checkpoints(folder))
    return Run(
        label=label, root=root, now=now, state=state, status=status, rows=rows, events=events, ledger=ledger,
        seconds=seconds_in_training(rows, spans, set(starts)), starts=starts, spans=spans,
        config_text=read_text(folder.config), config=config, record=read_object(folder.provenance, json.loads),
        evaluation=read_object(folder.evaluation, json.loads) or None, checkpoints=checkpoints,
    )  # fmt: skip


def state_of(status: Row, folder: RunFolder) -> str:
    """running, finished, stopped, failed or died; unknown without a readable status.json."""
    if not status:
        return "unknown"
    if status.get("phase") in ENDED:
        return str(status["phase"])
    return "running" if folder.is_locked() else "died"


def _spans(events: list[Row], ledger: Ledger, rows: list[Row], end: float | None) -> list[Span]:
    phases = [event for event in events if event.get("kind") == "phase"]
    known = [(t, event) for event in phases if (t := number(event, "time")) is not None]
    marks = phase_marks([(t, str(e.get("text")), "worker" in e) for t, e in known])
    times = [number(row, "time") for row in [*rows, *events]] + [ledger.last]
    spans = phase_spans(marks, sorted(t for t in times if t is not None), end)
    begun = next((span.start for span in spans if span.phase == "training"), math.inf)
    if any(t < begun for row in rows[:1] if (t := number(row, "time")) is not None):
        return []  # begun by a version that wrote no events
    return spans


def seconds_in_training(rows: list[Row], spans: list[Span], starts: set[int]) -> list[float | None]:
    """For each line. Without events.jsonl only what lies between two lines of one session is known, so the time before
    the first line of each is not counted."""
    times = [number(row, "time") for row in rows]
    if spans:
        training = [span for span in spans if span.phase == "training"]
        return [None if t is None else active_seconds(training, t) for t in times]
    found: list[float | None] = []
    total, before = 0.0, None
    for index, t in enumerate(times):
        if t is not None and before is not None and index not in starts:
            total += max(0.0, t - before)
        before = t if t is not None else before
        found.append(None if t is None else total)
    return found


def in_order(rows: Iterator[Row]) -> list[Row]:
    """Lines with a step. Where the steps go back, the lines that were made again replace the earlier ones."""
    kept: list[Row] = []
    for row in rows:
        if (step := number(row, "step")) is None:
            continue
        while kept and kept[-1]["step"] >= step:
            kept.pop()
        kept.append(row)
    return kept


def read_ledger(path: Path) -> Ledger:
    """Like `draftmill.run.ledger.read_ledger`, with times and names."""
    found = Ledger()
    for entry in read_lines(path):
        found.last = number(entry, "time") or found.last
        if (index := whole(entry, "trained")) is not None:
            found.trained(index, str(entry.get("target") or ""))
        elif (first := whole(entry, "from")) is not None:
            found.rewind(first)
            if entry.get("reason") is not None:
                found.rewinds.append((first, str(entry["reason"]), number(entry, "time")))
    return found


def _checkpoints(folder: RunFolder) -> Iterator[tuple[int, float]]:
    """(step, when it was complete) of each."""
    for manifest in folder.checkpoints.glob("step-*/manifest.json"):
        step = manifest.parent.name.removeprefix("step-")
        try:
            if step.isdecimal():
                yield int(step), manifest.stat().st_mtime
        except OSError:  # a running run has just removed it
            continue


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def read_lines(path: Path) -> Iterator[Row]:
    """The objects of a .jsonl file; a line that is none, as the one a kill cut short, is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def read_object(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Keys and values of a JSON or YAML file; none where there is no such file or it cannot be read."""
    try:
        values = parse(read_text(path))
    except (ValueError, RecursionError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def number(values: Row, key: str) -> float | None:
    """A finite number, or None for whatever else stands there."""
    return as_number(values.get(key))


def whole(values: Row, key: str) -> int | None:
    value = number(values, key)
    return None if value is None else round(value)


def numbers(values: Row, key: str) -> list[float | None]:
    """A list of such, empty where there is none."""
    found = values.get(key)
    return [as_number(item) for item in found] if isinstance(found, list) else []


def as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < LARGEST and math.isfinite(value) else None


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
