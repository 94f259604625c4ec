"""What a trace says: time by family of kernels, idle time between them, copies, the largest ones.

On a GPU the timeline is the device's: a kernel inside a CUDA graph is an event like any other. On a CPU it is that of
the thread that worked most, and an operation's time is what it spent itself, without the operations that it called.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GEMM, ATTENTION, ELEMENTWISE = "matrix products", "attention", "norms and elementwise"
LOSS, UPDATE, COPIES, COLLECTIVES, OTHER = "loss", "optimizer", "copies", "collectives", "other"
FAMILIES = (GEMM, ATTENTION, ELEMENTWISE, LOSS, UPDATE, COPIES, COLLECTIVES, OTHER)
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COPIED = ("gpu_memcpy", "gpu_memset")
TOP, LONGEST_GAPS = 10, 3

# The first that matches a name, in lower case, counts: names of fused kernels hold several of these words.
_RULES = tuple(
    (family, re.compile(pattern))
    for family, pattern in (
        (COLLECTIVES, r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter"),
        (LOSS, r"cross_?entropy|log_?softmax|logsumexp|nll"),
        (ATTENTION, r"attn|attention|attend|fmha|flash|softmax|^_forward$|backward_(queries|context|draft)"
                    r"|delta_rule|chunk_|recurrent|causal_conv"),
        (COPIES, r"memcpy|memset|copy_kernel|catarray|::(copy_|_to_copy|cat|clone|contiguous|fill_|zero_)$"),
        (UPDATE, r"multi_?tensor|foreach|adam|addcdiv|addcmul|lerp"),
        (GEMM, r"gemm|cutlass|cublas|nvjet|xmma|wgmma|splitk|_scaled_mm|(?<!::)matmul"
               r"|::(mm|addmm|bmm|baddbmm|dot)$"),
        (ELEMENTWISE, r"norm|elementwise|reduce|triton_(poi|red|per)|_(forward|backward|rows|largest|both)_kernel"
                      r"|::(add|sub|mul|div|neg|exp|pow|sqrt|rsqrt|sum|mean|silu|gelu|sigmoid|cos|sin|where)_?$"
                      r"|_backward$"),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operation:
    """All kernels or operations of one name."""

    name: str
    family: str
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Gap:
    """Nothing ran for so many seconds, between these two."""

    seconds: float
    after: str
    before: str


@dataclass(frozen=True, slots=True)
class Copy:
    """All copies of a kind. bytes: None where the trace does not say."""

    kind: str
    count: int
    seconds: float
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Summary:
    """timeline: "GPU" or "CPU". span: from the first to the last event on it; busy: when at least one ran; work: the
    sum over all, more than `busy` where several ran at once. families: in `FAMILIES`' order, those that occur. gaps:
    the longest; gap_count: all of them."""

    timeline: str
    span_seconds: float
    busy_seconds: float
    work_seconds: float
    families: tuple[Operation, ...]
    top: tuple[Operation, ...]
    gaps: tuple[Gap, ...]
    gap_count: int
    copies: tuple[Copy, ...]

    @property
    def idle_seconds(self) -> float:
        return self.span_seconds - self.busy_seconds

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "idle_seconds": self.idle_seconds}


@dataclass(frozen=True, slots=True)
class _Event:
    """Times in ns; own: the time that counts for its name."""

    name: str
    start: int
    end: int
    own: int


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Events of a Chrome trace, gzipped or not. ValueError where it is damaged."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def summarise(events: Iterable[dict[str, Any]]) -> Summary:
    """Of complete ("X") events. ValueError where no work was recorded."""
    events = list(events)
    on_device = [event for event in events if event.get("cat") in ON_DEVICE]
    work = [_event(event) for event in on_device] if on_device else _busiest_thread(events)
    if not work:
        raise ValueError("the trace holds no kernel and no operation")
    work.sort(key=lambda event: (event.start, event.end))
    busy, gaps = _gaps(work)
    operations = _by_name(work)
    return Summary(
        timeline="GPU" if on_device else "CPU",
        span_seconds=(max(event.end for event in work) - work[0].start) / 1e9,
        busy_seconds=busy / 1e9,
        work_seconds=sum(event.own for event in work) / 1e9,
        families=tuple(_families(operations)),
        top=tuple(operations[:TOP]),
        gaps=tuple(sorted(gaps, key=lambda gap: -gap.seconds)[:LONGEST_GAPS]),
        gap_count=len(gaps),
        copies=tuple(_copies(on_device, operations)),
    )


def family_of(name: str) -> str:
    lower = name.lower()
    return next((family for family, pattern in _RULES if pattern.search(lower)), OTHER)


def _event(event: dict[str, Any]) -> _Event:
    start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
    return _Event(str(event["name"]), start, start + length, length)


def _busiest_thread(events: list[dict[str, Any]]) -> list[_Event]:
    """CPU operations of the thread with most of their time, with the time each spent itself."""
    threads: dict[Any, list[_Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event["pid"], event["tid"]].append(_event(event))
    each = [_own_times(thread) for thread in threads.values()]
    return max(each, key=lambda thread: sum(event.own for event in thread), default=[])


def _own_times(thread: list[_Event]) -> list[_Event]:
    """Operations nest: what a called one took is taken off its caller."""
    thread.sort(key=lambda event: (event.start, -event.end))
    own = [event.own for event in thread]
    calling: list[int] = []
    for number, event in enumerate(thread):
        while calling and thread[calling[-1]].end <= event.start:
            calling.pop()
        if calling:
            own[calling[-1]] -= min(event.end, thread[calling[-1]].end) - event.start
        calling.append(number)
    return [_Event(event.name, event.start, event.end, time) for event, time in zip(thread, own, strict=True)]


def _gaps(work: list[_Event]) -> tuple[int, list[Gap]]:
    """(ns in which at least one ran, when none ran). work: by start."""
    busy, gaps = 0, []
    start, latest = work[0].start, work[0]
    for event in work[1:]:
        if event.start > latest.end:
            busy += latest.end - start
            gaps.append(Gap((event.start - latest.end) / 1e9, latest.name, event.name))
            start = event.start
        if event.end > latest.end:
            latest = event
    return busy + latest.end - start, gaps


def _by_name(work: list[_Event]) -> list[Operation]:
    """Most time first."""
    times: dict[str, list[int]] = defaultdict(list)
    for event in work:
        times[event.name].append(event.own)
    found = [Operation(name, family_of(name), len(own), sum(own) / 1e9) for name, own in times.items()]
    return sorted(found, key=lambda operation: (-operation.seconds, operation.name))


def _families(operations: list[Operation]) -> Iterable[Operation]:
    for family in FAMILIES:
        members = [operation for operation in operations if operation.family == family]
        if members:
            yield Operation(family, family, sum(m.count for m in members), sum(m.seconds for m in members))


def _copies(on_device: list[dict[str, Any]], operations: list[Operation]) -> Iterable[Copy]:
    """By kind. On a CPU: the operations that copy."""
    if not on_device:
        copying = (operation for operation in operations if operation.family == COPIES)
        yield from (Copy(one.name, one.count, one.seconds, None) for one in copying)
        return
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in on_device:
        if event["cat"] in COPIED:
            kinds[event["name"]].append(event)
    for kind, all_ in sorted(kinds.items()):
        sizes = [event.get("args", {}).get("bytes") for event in all_]
        known = sum(sizes) if all(size is not None for size in sizes) else None
        yield Copy(kind, len(all_), sum(event["dur"] for event in all_) / 1e6, known)
