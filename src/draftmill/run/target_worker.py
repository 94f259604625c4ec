"""A target's process: lease → forward → slot → done."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draftmill.data.tokenizer import load_tokenizer
from draftmill.handoff.device import DeviceRingWriters
from draftmill.handoff.interface import Transfer, Writer
from draftmill.handoff.matrices import SharedMatrices, is_tied
from draftmill.handoff.shared import RingShape, SharedRing, shared_writers
from draftmill.records import TokenBatch
from draftmill.run.job import Job, check_by_decoding
from draftmill.run.link import Link, report_compiles
from draftmill.run.messages import Check, Done, Failed, Loaded, Profile, Rings, Share, Shared, Stop, TargetFacts, Work
from draftmill.run.profiling import Profiler
from draftmill.run.states import States, bins_of, open_states
from draftmill.target.checks import StateCheck
from draftmill.train.checkpoint import load_drafter, open_checkpoint


@dataclass(frozen=True, slots=True)
class Moving:
    """A batch on its way into its slot. check: None where its states were verified before."""

    work: Work
    batch: TokenBatch
    features: Tensor
    check: StateCheck | None
    transfer: Transfer


@dataclass(frozen=True, slots=True)
class TargetJob(Job):
    """ring: the slots in host memory, or only their shape: then they lie in the drafters' devices, and handles come."""

    targets: int
    ring: SharedRing | RingShape
    matrices: SharedMatrices


class TargetWorker:
    """Answers one message after another. A batch's bytes may still be on their way while the next one is computed."""

    first = "forward"

    def __init__(self, link: Link, job: TargetJob) -> None:
        self.link, self.job = link, job
        self.activity = link.activity
        started = time.perf_counter()
        self.plan = job.prepare_process()
        report_compiles(link, job.device)
        bins = bins_of(self.plan, *job.batches)
        self.states = open_states(
            job.config, job.spec, self.plan, job.device, bins=bins, share=job.targets, activity=self.activity
        )
        self.writers: list[Writer] = []
        if isinstance(job.ring, SharedRing):
            self.writers += shared_writers(job.ring, job.device)
        self._direct: DeviceRingWriters | None = None
        self._moving: Moving | None = None
        self.profiler = Profiler(job.name, "target", "batches", job.device, link.activity.enter)
        self._batches = 0  # begun
        link.send(Loaded(facts_of(self.states, time.perf_counter() - started)))

    def run(self) -> None:
        while not isinstance(message := self._next(), Stop):
            if isinstance(message, Work):
                self._compute(message)
            elif isinstance(message, Share):
                self.activity.enter("loading", "embedding and head for the drafters")
                self.job.matrices.write(self.states.embedding, self.states.head)
                self.link.send(Shared())
            elif isinstance(message, Profile):
                self.profiler.request(message)
            elif isinstance(message, Rings):
                self._open(message.handles)
            elif isinstance(message, Check):
                self._check(Path(message.path))

    def _open(self, handles: tuple[bytes, ...]) -> None:
        """The drafters have (new) slots in their devices' memory."""
        assert isinstance(self.job.ring, RingShape)
        self._land()
        if self._direct is not None:
            self._direct.close()
        self._direct = DeviceRingWriters(handles, self.job.ring, self.job.device)
        self.writers = [*self._direct.writers]

    def _check(self, path: Path) -> None:
        config = self.job.config
        self.profiler.finish()
        self.activity.enter("checking")
        drafter = load_drafter(open_checkpoint(path)).to(self.job.device)
        tokenizer, prompts = load_tokenizer(config.target.model), config.decode_check_prompts
        self.link.send(check_by_decoding(self.states.target, drafter, self.plan.prepared, tokenizer, prompts))

    def _next(self) -> Any:
        if not self.link.pending():
            self._land()
            self.activity.enter("waiting for a slot")
        return self.link.receive()

    def _compute(self, work: Work) -> None:
        """Begin the batch, then see the one before it arrive: the device is never without work for that."""
        self.profiler.at(self._batches)
        self._batches += 1
        self.activity.enter("forward", f"batch {work.index}")
        batch, writer = self.plan.batch(work.index), self.writers[work.rank]
        features = writer.begin(work.slot)
        try:
            check = self.states.begin(batch, features)
        except Exception as error:
            names = ", ".join(map(str, batch.documents[:8])) + (" …" if len(batch.documents) > 8 else "")
            reason = (
                f"{type(error).__name__} in the target's forward of batch {batch.index} (documents {names}): {error}"
            )
            self.link.send(Failed(work.lease, reason))
            raise  # the device may be in any state: a new process goes on
        transfer = writer.end(work.slot)
        self._land()
        self._moving = Moving(work, batch, features, check, transfer)
        if transfer.ready():
            self._land()

    def _land(self) -> None:
        """The batch on its way has arrived: verify and report it."""
        if self._moving is None:
            return
        moving, self._moving = self._moving, None
        self.activity.enter("forward", f"batch {moving.work.index}")  # the device may still be at it
        moving.transfer.wait()
        try:
            if moving.check is not None:
                moving.check.verify()
                self.states.keep(moving.batch, moving.features)
        except ArithmeticError as error:
            self.link.send(Failed(moving.work.lease, str(error)))
        else:
            self.link.send(Done(moving.work.lease))


def facts_of(states: States, seconds: float = 0.0) -> TargetFacts:
    """What supervisor and drafters must know of a loaded target. seconds: that loading took."""
    rows, hidden = states.embedding.shape
    tied = is_tied(states.embedding, states.head)
    return TargetFacts(states.fingerprint, states.isolation, tied, rows, hidden, seconds)
