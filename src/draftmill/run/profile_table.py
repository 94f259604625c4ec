"""A profile on the terminal: of each worker what its device did, when it did nothing, and what took longest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from draftmill.run.profile_trace import Summary

LONGEST_NAME = 72


def rendered(result: dict[str, Any], summary: Summary) -> Iterator[RenderableType]:
    """result: a worker's own account."""
    unit, count = str(result["unit"]), max(1, int(result["count"]))
    one = {"steps": "step", "batches": "batch"}[unit]
    yield Text(f"\n{result['worker']} ({result['role']}, {result['device']})", "bold")
    yield Text(headline(result, summary))
    yield _families(summary, one, count)
    yield from (Text(line) for line in (*gap_lines(summary), *copy_lines(summary, count, one)))
    yield _top(summary, one, count)


def headline(result: dict[str, Any], summary: Summary) -> str:
    fewer = f" of {result['asked']}" if result["count"] < result["asked"] else ""
    what = "GPU" if summary.timeline == "GPU" else "thread"
    return (
        f"{result['count']}{fewer} {result['unit']} in {result['seconds']:.3g} s; the {what} was busy "
        f"{_share(summary.busy_seconds, summary.span_seconds)} of {time(summary.span_seconds)}, idle "
        f"{_share(summary.idle_seconds, summary.span_seconds)}"
    )


def gap_lines(summary: Summary) -> Iterator[str]:
    """How often nothing ran, and the longest of these times."""
    if summary.gap_count:
        yield f"gaps: {summary.gap_count:,}, together {time(summary.idle_seconds)}; the longest:"
    for gap in summary.gaps:
        yield f"  {time(gap.seconds)} between {_short(gap.after, 44)} and {_short(gap.before, 44)}"


def copy_lines(summary: Summary, count: int, one: str) -> Iterator[str]:
    for copy in summary.copies:
        size = ""
        if copy.bytes is not None:
            rate = f", {copy.bytes / copy.seconds / 1e9:.1f} GB/s" if copy.seconds else ""
            size = f", {copy.bytes / count / 1e6:,.1f} MB a {one}{rate}"
        yield f"copies: {_short(copy.kind, 44)}: {copy.count / count:,.1f} a {one}, {time(copy.seconds / count)}{size}"


def time(seconds: float) -> str:
    """1.23 s, 45.6 ms, 7.8 µs."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def _families(summary: Summary, one: str, count: int) -> Table:
    kind = "kernels" if summary.timeline == "GPU" else "operations"
    table = _table("family", f"a {one}", "share", f"{kind} a {one}")
    for family in sorted(summary.families, key=lambda family: -family.seconds):
        share = _share(family.seconds, summary.work_seconds)
        table.add_row(family.name, time(family.seconds / count), share, f"{family.count / count:,.1f}")
    return table


def _top(summary: Summary, one: str, count: int) -> Table:
    table = _table("longest", f"a {one}", "share", f"times a {one}", "family")
    for operation in summary.top:
        share = _share(operation.seconds, summary.work_seconds)
        times = f"{operation.count / count:,.1f}"
        table.add_row(
            _short(operation.name, LONGEST_NAME), time(operation.seconds / count), share, times, operation.family
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="left" if heading == "family" else "right", no_wrap=True)
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"
