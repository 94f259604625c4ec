"""Profiling on demand, the run's side: a request in the run folder becomes traces of single workers.

The main process looks for a request once a second and passes it on. A worker that got one records between two of its
steps or batches; nothing is asked of it, or of the disk, before that. Whatever goes wrong is written into the result: a
profile never ends a run, and never changes what it computes.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from draftmill.run.background import repeated
from draftmill.run.files import RunFolder, write_atomically
from draftmill.run.messages import Profile

REQUEST = "profile-request.json"
FOLDER = "profiles"
WORKERS = "workers.json"  # who records: name → process
LOOK_SECONDS = 1.0

Doing = Callable[[str, str], None]  # is told what the worker does now, and how far


class Requests:
    """What users ask of the run that holds the folder, in the eyes of its main process. Requests from before it took
    the folder are dropped; one made while it loads waits."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._path = folder, folder.root / REQUEST
        self._looked = time.monotonic()

    def take(self) -> Profile | None:
        """The next request, if there is one; looks for it at most once a second. It must be answered by `accept`."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return None
        self._looked = now
        if not self._path.exists():
            return None
        try:
            old = self._path.stat().st_mtime < self._folder.locked_since()
            wanted = json.loads(self._path.read_text())
            self._path.unlink()
            folder = self._folder.root.absolute() / FOLDER / str(wanted["name"])
            return None if old else Profile(str(folder), int(wanted["steps"]))
        except (OSError, ValueError, KeyError, TypeError):  # withdrawn meanwhile, or no request of ours
            return None


def accept(wanted: Profile, workers: dict[str, int]) -> None:
    """Tell the user who will record: worker → process."""
    with contextlib.suppress(OSError):  # the user waits in vain, the run goes on
        write_atomically(Path(wanted.folder) / WORKERS, json.dumps(workers))


@contextlib.contextmanager
def listening(folder: RunFolder, profiler: Profiler, noted: Callable[[str], None]) -> Iterator[None]:
    """For a run in one process: a thread passes requests on while its loop trains. noted: is told of each, in words."""
    requests = Requests(folder)

    def listen() -> None:
        if wanted := requests.take():
            noted(asked(wanted, [profiler.name]))
            accept(wanted, {profiler.name: os.getpid()})
            profiler.request(wanted)

    try:
        with repeated("profile requests", LOOK_SECONDS, listen):
            yield
    finally:
        profiler.finish()


def asked(wanted: Profile, names: list[str]) -> str:
    """For the record: a profile slows the run down for a while."""
    return f"recording {wanted.steps} steps or batches of {' and '.join(names)}, into {wanted.folder}"


class Profiler:
    """A worker's side: `at` its boundaries it begins and ends what it was requested to record.

    unit: what it counts, "steps" or "batches". doing: is told when it begins and writes. No method raises.
    """

    def __init__(self, name: str, role: str, unit: str, device: str, doing: Doing) -> None:
        self.name = name
        self._role, self._unit, self._device, self._doing = role, unit, device, doing
        self._wanted: Profile | None = None
        self._last: int | None = None
        self._recording: _Recording | None = None

    def request(self, wanted: Profile) -> None:
        """From any thread. Begins at the next boundary."""
        if self._recording is not None:
            self._answer(wanted, error="it is still recording for an earlier request")
        else:
            self._wanted = wanted

    def at(self, number: int) -> None:
        """The worker is between two pieces of work and about to begin number `number`, or goes on with it."""
        if self._recording is not None and number >= self._recording.first + self._recording.wanted.steps:
            self._end(number)
        elif self._wanted is not None and number != self._last:
            self._begin(number)
        self._last = number

    def finish(self) -> None:
        """The worker's work is over: what was recorded so far is the result."""
        if self._recording is not None:
            self._end((self._last or 0) + 1)
        elif self._wanted is not None:
            self._answer(self._wanted, error="the run was over before it began")
        self._wanted = None

    def _begin(self, number: int) -> None:
        wanted, self._wanted = self._wanted, None
        assert wanted is not None
        self._doing("profiling", "begins")
        try:
            self._recording = _Recording(wanted, number, self._device)
        except Exception as error:
            self._answer(wanted, error=_in_words(error))

    def _end(self, number: int) -> None:
        recording, self._recording = self._recording, None
        assert recording is not None
        trace = Path(recording.wanted.folder) / f"{self.name}.json"
        count = number - recording.first
        self._doing("profiling", "writes the trace")
        try:
            seconds = recording.stop(trace)
        except Exception as error:
            with contextlib.suppress(OSError):
                trace.unlink(missing_ok=True)
            self._answer(recording.wanted, count=count, error=_in_words(error))
        else:
            self._answer(recording.wanted, count=count, seconds=seconds, trace=trace.name)

    def _answer(self, wanted: Profile, **more: Any) -> None:
        values = {
            "worker": self.name, "role": self._role, "device": self._device, "unit": self._unit,
            "asked": wanted.steps, "count": 0, "seconds": None, "trace": None, "error": None, **more,
        }  # fmt: skip
        with contextlib.suppress(OSError):  # a full disk, or the folder is gone: the user is told that nothing came
            write_atomically(Path(wanted.folder) / f"{self.name}.result.json", json.dumps(values))


class _Recording:
    """torch's profiler at work. first: the piece of work it began with."""

    def __init__(self, wanted: Profile, first: int, device: str) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        self.wanted, self.first, self._cuda = wanted, first, device.startswith("cuda")
        activities = [ProfilerActivity.CPU]
        if self._cuda:
            # taken down behind a profile, CUPTI may crash a process whose step is a CUDA graph (CUDA below 12.6)
            os.environ["DISABLE_CUPTI_LAZY_REINIT"], os.environ["TEARDOWN_CUPTI"] = "1", "0"
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(device)  # what was launched before does not belong here
        self._profile = profile(activities=activities)
        self._profile.start()
        self._started = time.perf_counter()

    def stop(self, trace: Path) -> float:
        """Write the trace. Returns the seconds that were recorded."""
        import torch

        if self._cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        self._profile.stop()
        partial = trace.with_suffix(".partial")
        self._profile.export_chrome_trace(str(partial))
        partial.replace(trace)
        return seconds


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
