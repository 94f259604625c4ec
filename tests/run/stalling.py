"""Workers that hang in one way each, started as the run starts its own."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any

from draftmill.run.link import Link


@dataclass(frozen=True, slots=True)
class StallingJob:
    how: str
    device: str = "cpu"


class Stalling:
    first = "forward"

    def __init__(self, link: Link, job: StallingJob) -> None:
        self.link, self.job = link, job

    def run(self) -> None:
        activity = self.link.activity
        for batch in range(3):
            activity.enter("forward", f"batch {batch}")
            time.sleep(0.01)
        {
            "asleep": lambda: (activity.enter("forward", "batch 812"), sleep_for_good()),
            "busy": lambda: (activity.enter("forward", "batch 812"), compute_for_good()),
            "held": lambda: (activity.enter("forward", "batch 812"), hold_the_interpreter()),
            "waiting": lambda: (activity.enter("waiting for a slot"), self.wait_for_work()),
            "back": lambda: (activity.enter("forward", "batch 812"), time.sleep(8), self.wait_for_work()),
        }[self.job.how]()

    def wait_for_work(self) -> Any:
        self.link.activity.enter("waiting for a slot")
        return self.link.receive()


def sleep_for_good() -> None:
    time.sleep(600)


def compute_for_good() -> None:
    while True:
        sum(range(10_000))


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(600)  # a PyDLL does not give the interpreter back while it runs
