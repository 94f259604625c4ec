"""What a run says while it goes: a live line on a terminal, sparse lines elsewhere, metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from draftmill.run.files import RunFolder
from draftmill.run.status import StatusWriter, duration


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
        return (tokens - first_tokens) / seconds, (self.total_steps - step) * seconds / steps


class Telemetry:
    """One per run. `log` is called by the training loop with a dict of plain numbers."""

    def __init__(self, folder: RunFolder, status: StatusWriter, meter: Meter, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._status, self._meter = status, meter
        self._metrics = folder.metrics.open("a")
        self._board = SummaryWriter(str(folder.tensorboard), purge_step=start_step + 1 if start_step else None)
        self._console = Console(stderr=True)
        self._bar = _Bar(self._console, meter.total_steps, start_step) if sys.stderr.isatty() else None

    def log(self, values: dict[str, Any]) -> None:
        rate, left = self._meter.read(values["step"], values["context_tokens"])
        row = {**values, "tokens_per_second": rate, "time": time.time()}
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        for name in ("loss", "accuracy", "tau_teacher_forced", "lr", "gradient_norm", "tokens_per_second"):
            if row[name] is not None:
                self._board.add_scalar(name, row[name], values["step"])
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
        if self._bar:
            self._bar.close()
        self._metrics.close()
        self._board.close()

    def _show(self, values: dict[str, Any], rate: float | None, left: float | None) -> None:
        text = (
            f"loss {_number(values['loss'], '.3f')}  τ {_number(values['tau_teacher_forced'], '.2f')}  "
            f"{'–' if rate is None else f'{rate:,.0f}'} tok/s  left {'estimating' if left is None else duration(left)}"
        )
        if self._bar:
            self._bar.show(values["step"], text)
        else:
            print(f"step {values['step']}/{self._meter.total_steps}  {text}", file=sys.stderr, flush=True)


def _number(value: float | None, form: str) -> str:
    return "– (updates skipped)" if value is None else format(value, form)


class _Bar:
    def __init__(self, console: Console, total: int, start: int) -> None:
        columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.fields[text]}"))
        self._progress = Progress(*columns, console=console)
        self._task: TaskID = self._progress.add_task("", total=total, completed=start, text="first steps …")
        self._progress.start()

    def show(self, step: int, text: str) -> None:
        self._progress.update(self._task, completed=step, text=text)

    def close(self) -> None:
        self._progress.stop()
