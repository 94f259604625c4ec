"""What `train` says of its session when it is over."""

from __future__ import annotations

import time
from collections.abc import Iterator

from draftmill.run.events import tail
from draftmill.run.files import RunFolder
from draftmill.run.findings import steady_tokens_per_second
from draftmill.run.status import read_status
from draftmill.run.status_view import times_line, warning_line


def look_back(folder: RunFolder) -> Iterator[str]:
    """Lines: where the time went, how fast it was, what was lost, and which warnings still stand."""
    status = read_status(folder.root)
    yield f"time: {times_line(status)}"
    rows = [row for row in tail(folder.metrics) if row.get("time", 0.0) >= status["started"]]
    if (rate := steady_tokens_per_second(rows, tail(folder.events))) is not None:
        tau = "" if status.get("tau") is None else f", τ {status['tau']:.2f} (teacher-forced)"
        yield f"steady: {rate:,.0f} context tokens/s{tau}"
    counts = [(status.get("skipped"), "skipped updates"), (status.get("restarts"), "restarts of workers")]
    if lost := [f"{count} {what}" for count, what in counts if count]:
        yield f"lost on the way: {', '.join(lost)}"
    for event in status["warnings"]:
        yield f"still open, {warning_line(event, time.time())}"
