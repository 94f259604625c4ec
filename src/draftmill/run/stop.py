"""Ends a run in good order: on SIGINT, SIGTERM or a time limit the current step is dropped and a checkpoint written."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """`reason` is None until something asks for the end. exit_code: 128 + signal, 0 for the time limit."""

    def __init__(self, max_seconds: float | None = None) -> None:
        self.reason: str | None = None
        self.exit_code = 0
        self._max_seconds = max_seconds
        self._started: float | None = None

    def start_clock(self) -> None:
        """The time limit counts from here."""
        self._started = time.monotonic()

    def __call__(self) -> bool:
        over = self._max_seconds is not None and self._started is not None
        if self.reason is None and over and time.monotonic() - self._started > self._max_seconds:  # type: ignore[operator]
            self.reason = f"train.max_minutes ({self._max_seconds / 60:g}) is over"  # type: ignore[operator]
        return self.reason is not None

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """A first SIGINT or SIGTERM asks; a second SIGINT interrupts at once."""
        kinds = (signal.SIGINT, signal.SIGTERM)
        before = {kind: signal.signal(kind, self._ask) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
        self.exit_code = 128 + number
