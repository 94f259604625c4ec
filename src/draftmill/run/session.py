"""What every kind of run has in common: its folder, its record, its telemetry, its last words."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from draftmill.config import RunConfig, dump_yaml
from draftmill.errors import UserError
from draftmill.run.build import Built, identity
from draftmill.run.console import say
from draftmill.run.events import EventLog
from draftmill.run.files import RunFolder, write_atomically
from draftmill.run.messages import Checked
from draftmill.run.provenance import provenance
from draftmill.run.resume import check_same_target
from draftmill.run.status import StatusWriter
from draftmill.run.stop import StopRequest
from draftmill.run.summary import look_back
from draftmill.run.telemetry import Meter, Telemetry
from draftmill.train.checkpoint import Checkpoint, find_latest
from draftmill.train.trainer import DivergedError


@dataclass(frozen=True, slots=True)
class Outcome:
    """Where a run ended. finished: the schedule was completed."""

    step: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Session:
    """One command's part of a run, from start or checkpoint to the end."""

    config: RunConfig
    folder: RunFolder
    built: Built
    status: StatusWriter
    events: EventLog
    checkpoint: Checkpoint | None
    stop: StopRequest
    trial: bool = False

    @property
    def start_step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step

    def check_target(self, fingerprint: str) -> None:
        if self.checkpoint is not None:
            check_same_target(self.checkpoint, fingerprint)

    def write_record(self) -> None:
        """config.yaml, run.json, and metrics without the steps that are made again."""
        write_atomically(self.folder.config, dump_yaml(self.config))
        spec = self.built.spec.to_dict()
        record = {**provenance(), "target": self.config.target.model, **identity(self.config, self.built), "spec": spec}
        write_atomically(self.folder.provenance, json.dumps(record, indent=1))
        self.folder.cut_metrics(self.start_step)

    def begin_training(self) -> None:
        self.status.phase("training", total_steps=self.built.total_steps, step=self.start_step)
        self.stop.start_clock()

    def telemetry(self, step: int) -> Telemetry:
        """For training from `step` on. The caller closes it."""
        return Telemetry(self.folder, self.status, Meter(self.built.total_steps), step)

    def saved(self, step: int, seconds: float) -> None:
        self.status.saved(seconds)
        self.events.add("checkpoint", f"step {step}, saved in {seconds:.1f} s", step=step, seconds=round(seconds, 3))

    def checked(self, result: Checked) -> None:
        """The decode check's outcome, for the status file and the console."""
        self.status.update(decode_check=result.result)
        say(result.text)

    def conclude(self, outcome: Outcome) -> int:
        """The last lines and the exit code."""
        latest, _ = find_latest(self.folder.checkpoints)
        if outcome.finished:
            assert latest is not None
            self.status.phase("finished", step=latest.step)
            if not self.trial:
                self._look_back()
                say(f"finished: drafter at {latest.path}")
                say(f"next: draftmill evaluate {self.folder.root} --prompts FILE.jsonl")
            return 0
        self.status.phase("stopped", step=outcome.step, reason=self.stop.reason)
        self._look_back()
        saved = "nothing was trained yet" if latest is None else f"saved in {latest.path}"
        say(f"stopped at step {outcome.step} of {self.built.total_steps}: {self.stop.reason}; {saved}")
        say(f"go on: draftmill train {self.folder.config} --resume")
        if self.stop.exit_code == 0:
            say("warning: the schedule was cut before the learning rate reached its end; the drafter suffers for it")
        return self.stop.exit_code

    def _look_back(self) -> None:
        for line in look_back(self.folder):
            say(line)


@contextmanager
def in_plain_words(folder: RunFolder) -> Iterator[None]:
    """What ends training early, in the user's terms: divergence, states nobody should train on, a full disk."""
    try:
        yield
    except (DivergedError, ArithmeticError) as error:
        raise UserError(f"the run stopped: {error}") from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        latest, _ = find_latest(folder.checkpoints)
        kept = "nothing was saved yet" if latest is None else f"{latest.path} is complete"
        raise UserError(f"the disk of {folder.root} is full; {kept}. Free space, then go on with --resume") from error
