"""Which side waits for the other: shares of time, from what the workers say of themselves."""

from __future__ import annotations

from draftmill.run.launch_local import Worker


class Waits:
    """Shares since the last question, start-up excluded: workers count only from their first batch on."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    def share(self, side: str, workers: list[Worker]) -> float | None:
        """Waiting / (waiting + working), 0 … 1. None while there is nothing to go by."""
        busy = sum(worker.beat.busy for worker in workers)
        waiting = sum(worker.beat.waiting for worker in workers)
        busy_before, waiting_before = self._last.get(side, (0.0, 0.0))
        self._last[side] = (busy, waiting)
        worked, waited = busy - busy_before, waiting - waiting_before
        if worked < 0 or waited < 0 or worked + waited <= 0:  # a worker was replaced, or has not begun
            return None
        return waited / (worked + waited)
