"""Which batch was trained, by which rank, on whose states: one line each, so that nobody has to believe it."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import TextIO


class Ledger:
    """Appends to `ledger.jsonl`. Lines survive the death of this process; a last line cut short is ignored.

    first: the first batch that is not in the checkpoint. Those before it that a killed process had no time to write
    down are noted without a rank.
    """

    def __init__(self, path: Path, first: int) -> None:
        known = read_ledger(path) if path.exists() else Counter()
        self._file: TextIO = path.open("a", buffering=1)
        for index in range(first):
            if not known[index]:
                self.trained(index, None, None)
        self._write({"from": first})

    def trained(self, index: int, rank: int | None, target: str | None) -> None:
        self._write({"trained": index, "rank": rank, "target": target})

    def rewound(self, first: int, reason: str) -> None:
        """Batches from `first` on are trained again: their updates were lost with the drafter's process."""
        self._write({"from": first, "reason": reason})

    def ended(self, first: int) -> None:
        """The run ends before batch `first`. Later ones were of a step that was thrown away unfinished."""
        self._write({"from": first})

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: dict[str, object]) -> None:
        self._file.write(json.dumps({**entry, "time": round(time.time(), 3)}) + "\n")


def read_ledger(path: Path) -> Counter[int]:
    """How often each batch is part of the drafter as it is: once each, in a sound run."""
    counts: Counter[int] = Counter()
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # the line a kill cut short
            continue
        if "trained" in entry:
            counts[entry["trained"]] += 1
        else:
            counts = Counter({index: n for index, n in counts.items() if index < entry["from"]})
    return counts
