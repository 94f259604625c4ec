"""What a run says while it goes: metrics.jsonl, TensorBoard, the numbers of the status, and sparse lines."""

from __future__ import annotations

import time
from collections import deque
from json import dumps
from typing import Any

from draftmill.run.console import is_live, say
from draftmill.run.events import EventLog, tail
from draftmill.run.files import RunFolder
from draftmill.run.status import StatusWriter
from draftmill.run.words import duration

FIRST_LINES = 3  # are all shown
LINE_SECONDS = 10.0  # between two of the others
SKIPPED = (
    "the gradient was not finite, so the drafter learnt nothing from these batches. A few are harmless; ten in a row "
    "end the run. If it goes on, lower train.lr"
)


class Meter:
    """Tokens per second and time left, from this session's recent steps only.

    The first interval holds warm-up and is left out; so is time spent saving (`pause`). A window of intervals, not all
    of them, because a run may get faster or slower: with reused states the first epoch is the slow one.
    """

    WINDOW = 8

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=self.WINDOW + 1)
        self._paused = 0.0

    def pause(self, seconds: float) -> None:
        self._paused += seconds

    def read(self, step: int, tokens: int) -> tuple[float | None, float | None]:
        """(context tokens per second, seconds left) after a log line; None, None while there is nothing to go by."""
        self._marks.append((time.perf_counter() - self._paused, step, tokens))
        (first, first_step, first_tokens), (last, _, _) = self._marks[0], self._marks[-1]
        seconds, steps = last - first, step - first_step
        if seconds <= 0 or steps <= 0:
            return None, None
        return (tokens - first_tokens) / seconds, max(0, self.total_steps - step) * seconds / steps


class Telemetry:
    """One per run. `log` is called by the training loop with a dict of plain numbers."""

    def __init__(self, folder: RunFolder, status: StatusWriter, meter: Meter, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._status, self._meter = status, meter
        self._events = EventLog(folder.events)
        earlier = tail(folder.metrics)[-1:]
        self._skipped = earlier[0].get("skipped", 0) if earlier else 0
        self._metrics = folder.metrics.open("a")
        self._board = SummaryWriter(str(folder.tensorboard), purge_step=start_step + 1 if start_step else None)
        self._lines = 0
        self._shown_at = 0.0
        self._unshown: str | None = None

    def log(self, values: dict[str, Any]) -> None:
        rate, left = self._meter.read(values["step"], values["context_tokens"])
        row = {**values, "tokens_per_second": rate, "time": time.time()}
        self._metrics.write(dumps(row) + "\n")
        self._metrics.flush()
        self._draw(row)
        self._note_skipped(values)
        self._status.update(
            step=values["step"],
            loss=values["loss"],
            tau=values["tau_teacher_forced"],
            tokens_per_second=rate,
            eta_seconds=left,
            skipped=values["skipped"],
            waits=values.get("waits"),
        )
        self._show(values, rate, left)

    def saved(self, seconds: float) -> None:
        """A checkpoint took this long; it counts neither in tokens/s nor in the time left."""
        self._meter.pause(seconds)

    def close(self) -> None:
        if self._unshown is not None:
            say(self._unshown)
        self._metrics.close()
        self._board.close()

    def _draw(self, row: dict[str, Any]) -> None:
        """All in one event: with one for each, a line would cost three times as much."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(row).items()]
        writer: Any = self._board.file_writer
        writer.add_summary(Summary(value=values), row["step"])

    def _note_skipped(self, values: dict[str, Any]) -> None:
        new = values["skipped"] - self._skipped
        if new > 0:
            self._skipped = values["skipped"]
            updates = "1 update was skipped" if new == 1 else f"{new} updates were skipped"
            text = f"up to step {values['step']} {updates} ({self._skipped} in all): {SKIPPED}"
            self._events.add("skipped", text, step=values["step"], total=self._skipped)
            say(f"skipped: {text}")

    def _show(self, values: dict[str, Any], rate: float | None, left: float | None) -> None:
        """So few lines that a log file of days can be read; the last one is always among them. None in a live view."""
        if is_live():
            return
        self._unshown = (
            f"step {values['step']}/{self._meter.total_steps}  "
            f"loss {_number(values['loss'], '.3f')}  τ {_number(values['tau_teacher_forced'], '.2f')}  "
            f"{'–' if rate is None else f'{rate:,.0f}'} tok/s  left {'estimating' if left is None else duration(left)}"
        )
        now, last = time.monotonic(), values["step"] >= self._meter.total_steps
        if last or self._lines < FIRST_LINES or now - self._shown_at >= LINE_SECONDS:
            say(self._unshown)
            self._lines, self._shown_at, self._unshown = self._lines + 1, now, None


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """Of a line of metrics.jsonl, what can be drawn over `step`: name → number. A list has one for each slot, as
    slot_loss/01; nested keys get a slash, as waits/drafters_wait. What is unknown is left out."""
    found: dict[str, float | None] = {}
    for key, value in row.items():
        if isinstance(value, list):
            found |= {f"{key}/{slot:02d}": share for slot, share in enumerate(value, 1)}
        elif isinstance(value, dict):
            found |= {f"{key}/{inner}": number for inner, number in value.items()}
        elif key not in ("step", "time"):
            found[key] = value
    return {name: float(number) for name, number in found.items() if number is not None}


def _number(value: float | None, form: str) -> str:
    return "– (updates skipped)" if value is None else format(value, form)
