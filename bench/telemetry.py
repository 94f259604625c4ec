"""What it costs to know where a run is: its speed with all that watches and records it, and without, in turns.

    python bench/telemetry.py CONFIG [--minutes 4] [--turn 2] [KEY=VALUE …]

One run on one device. Every --turn seconds all of it is switched off or on again: activities, the watchdog and its
status, stall detection, load of the devices, metrics.jsonl, TensorBoard, lines. So what drifts, such as clocks and
neighbours, meets both alike. Prints the speed of either, the difference of neighbouring turns with its standard error,
and what a log line takes. Nothing is saved and nothing decoded meanwhile.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from draftmill.config import load_run_config
from draftmill.run.activity import Activity
from draftmill.run.load import LoadSampler
from draftmill.run.stalls import Stalls
from draftmill.run.telemetry import Telemetry
from draftmill.run.train import train
from draftmill.run.watchdog import Watchdog

SWITCHED = ((Telemetry, "log"), (Watchdog, "_tell"), (Stalls, "look"), (LoadSampler, "tell"))
WARM_UP_SECONDS = 20.0


class Turns:
    """Counts micro-steps, by turn. rates: (whether it was on, micro-steps a second)."""

    def __init__(self, seconds: float) -> None:
        self.on = True
        self.rates: list[tuple[bool, float]] = []
        self.log_seconds: list[float] = []
        self._seconds = seconds
        self._began: float | None = None
        self._steps = 0

    def micro_step(self) -> None:
        now = time.perf_counter()
        if self._began is None:
            self._began = now + WARM_UP_SECONDS
        elif now - self._began >= self._seconds:
            self.rates.append((self.on, self._steps / (now - self._began)))
            self.on, self._began, self._steps = not self.on, now, 1
        elif now >= self._began:
            self._steps += 1

    def switch(self, owner: type, name: str) -> None:
        """Have the method do nothing while it is off."""
        method: Callable[..., Any] = getattr(owner, name)

        def switched(*arguments: Any, **more: Any) -> Any:
            if not self.on:
                return None
            began = time.perf_counter()
            result = method(*arguments, **more)
            if owner is Telemetry:
                self.log_seconds.append(time.perf_counter() - began)
            return result

        setattr(owner, name, switched)

    def count(self) -> None:
        """Activities are switched too, and say when a micro-step begins."""
        enter = Activity.enter

        def switched(activity: Activity, name: str, what: str | None = None) -> None:
            if name == "micro-step":
                self.micro_step()
            if self.on:
                enter(activity, name, what)

        Activity.enter = switched  # type: ignore[method-assign]


def report(turns: Turns) -> None:
    for on in (True, False):
        rates = [rate for was_on, rate in turns.rates if was_on == on]
        print(f"{'with' if on else 'without':8} {statistics.mean(rates):9.3f} micro-steps/s over {len(rates)} turns")
    pairs = [
        (second - first if on else first - second) / ((first + second) / 2)
        for (on, first), (_, second) in pairwise(turns.rates[1:])  # the first began within a micro-step
    ]
    error = statistics.stdev(pairs) / math.sqrt(len(pairs) / 2)  # each turn is in two pairs
    print(f"cost     {statistics.mean(pairs):.2%} ± {error:.2%} of the speed; median {statistics.median(pairs):.2%}")
    if turns.log_seconds:
        print(f"a log line takes {statistics.median(turns.log_seconds) * 1e3:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--turn", type=float, default=2.0)
    arguments = parser.parse_intermixed_args()
    turns = Turns(arguments.turn)
    for owner, name in SWITCHED:
        turns.switch(owner, name)
    turns.count()
    with tempfile.TemporaryDirectory() as folder:
        own = [f"run_dir={folder}/run", f"train.max_minutes={arguments.minutes}", "train.save_every=1000000",
               "train.epochs=10000", "decode_check_prompts=0"]  # fmt: skip
        train(load_run_config(arguments.config, [*arguments.overrides, *own]), resume=False)
    report(turns)


if __name__ == "__main__":
    main()
