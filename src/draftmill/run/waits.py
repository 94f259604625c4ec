"""Which side waits for the other: shares of time, from what the workers say of themselves."""

from __future__ import annotations

from draftmill.run.launch_local import Worker


class Waits:
    """Shares since the last question, start-up excluded: a worker's time counts from its first batch on."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}
        self._shares: dict[str, float | None] = {}

    def share(self, side: str, workers: list[Worker]) -> float | None:
        """Time waiting / all time, 0 … 1; as before where no worker has spoken since. None while there is nothing to go
        by."""
        waited = sum(worker.beat.waited for worker in workers)
        steady = sum(worker.beat.steady for worker in workers)
        waited_before, steady_before = self._last.get(side, (0.0, 0.0))
        self._last[side] = (waited, steady)
        if waited < waited_before or steady < steady_before:  # a worker was replaced
            self._shares[side] = None
        elif steady > steady_before:
            self._shares[side] = min(1.0, (waited - waited_before) / (steady - steady_before))
        return self._shares.get(side)
