"""What happened in a run, one line each, for people and scripts: events.jsonl.

{"time": seconds since 1970, "kind": …, "text": …, and details}. Kinds: phase (of the run or, with "worker", of a
process), checkpoint, warning, rewound.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

TAIL_BYTES = 1 << 18


class EventLog:
    """Appends to the file; each line is there at once and whole, so that a kill loses nothing that was said."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, kind: str, text: str, **details: Any) -> None:
        line = json.dumps({"time": round(time.time(), 6), "kind": kind, "text": text, **details}) + "\n"
        with self._path.open("a") as file:
            file.write(line)

    def warning(self, text: str) -> None:
        self.add("warning", text)


def tail(path: Path, size: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The last complete lines of a .jsonl file, from its last `size` bytes; none where there is no file.

    A line that is cut, at either end, is left out.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(0, 2)
        start = max(0, file.tell() - size)
        file.seek(start)
        lines = file.read().split(b"\n")
    rows = []
    for line in lines[1 if start else 0 :]:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
