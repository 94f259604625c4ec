"""Which side waits for the other: shares of time, from what the workers say of themselves."""

from __future__ import annotations

from draftmill.run.launch_local import Worker


class Waits:
    """Shares since the last question, start-up excluded: workers count only from their first batch on."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}
        self._shares: dict[str, float | None] = {}

    def share(self, side: str, workers: list[Worker]) -> float | None:
        """Waiting / (waiting + working), 0 … 1; as before where no worker has spoken since. None while there is nothing
        to go by."""
        busy = sum(worker.beat.busy for worker in workers)
        waiting = sum(worker.beat.waiting for worker in workers)
        busy_before, waiting_before = self._last.get(side, (0.0, 0.0))
        self._last[side] = (busy, waiting)
        worked, waited = busy - busy_before, waiting - waiting_before
        if worked < 0 or waited < 0:  # a worker was replaced
            self._shares[side] = None
        elif worked + waited > 0:
            self._shares[side] = waited / (worked + waited)
        return self._shares.get(side)
