"""A drafter rank's process: next batch → micro-step → reduced gradients → update. Inline ranks run the target too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draftmill.data.tokenizer import load_tokenizer
from draftmill.drafter.model import Drafter
from draftmill.handoff.device import DeviceRing
from draftmill.handoff.interface import BatchSource, Reader
from draftmill.handoff.matrices import SharedMatrices
from draftmill.handoff.memory import MemoryRing
from draftmill.handoff.shared import RingShape, SharedRing, shared_reader
from draftmill.run.console import say
from draftmill.run.files import RunFolder
from draftmill.run.job import Job, check_by_decoding, starting_drafter, step_settings
from draftmill.run.link import Link, report_compiles
from draftmill.run.messages import Ended, Loaded, Log, Matrices, Released, RingReady, Saved, TargetFacts
from draftmill.run.profiling import Profiler
from draftmill.run.session import in_plain_words
from draftmill.run.sources import InlineSource, QueuedSource, StepGate
from draftmill.run.states import bins_of, open_states
from draftmill.run.target_worker import facts_of
from draftmill.train.checkpoint import Checkpoint, load_drafter, open_checkpoint
from draftmill.train.parallel import Alone, DataParallel, Doing, FullySharded, Parallel
from draftmill.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class DrafterJob(Job):
    """rendezvous: file in which the ranks find each other. identity: of the run, for checkpoints. ring: host memory, or
    only its shape where the slots are to lie in this device's memory; None for an inline rank."""

    rank: int
    ranks: int
    rendezvous: Path
    checkpoints: Path
    checkpoint: Checkpoint | None
    total_steps: int
    identity: dict[str, Any]
    ring: SharedRing | RingShape | None
    matrices: SharedMatrices | None


class DrafterWorker:
    first = "micro-step"

    def __init__(self, link: Link, job: DrafterJob) -> None:
        self.link, self.job = link, job
        self.activity = link.activity
        role = "target and drafter" if job.ring is None else "drafter"
        self.profiler = Profiler(job.name, role, "steps", job.device, link.activity.enter)
        self.plan = job.prepare_process()
        report_compiles(link, job.device)

    def run(self) -> None:
        job = self.job
        self.activity.enter("starting", "the ranks meet")
        with parallel_ranks(job, self.activity.enter) as parallel:
            self.activity.enter("loading", "the drafter")
            drafter = starting_drafter(job.checkpoint, job.spec, job.config.seed, job.device)
            if job.ring is None:
                self._run_inline(drafter, parallel)
                return
            reader = self._reader(job.ring)
            self._warm_up()
            facts = self._await_matrices()
            if facts is None:  # asked to stop before there was anything to train on
                self.link.send(Ended(0 if job.checkpoint is None else job.checkpoint.step, finished=False))
                return
            assert job.matrices is not None
            self.activity.enter("loading", "embedding and head")
            embedding, head = job.matrices.read(tied=facts.tied, device=job.device)
            source = QueuedSource(
                self.link,
                self.plan,
                reader,
                batches_per_step=job.config.train.accumulation,
                whole_rounds=parallel.always_run,
                fingerprint=facts.fingerprint,
                taps=job.spec.taps,
                profiler=self.profiler,
            )
            self._train(self._trainer(drafter, source, parallel, embedding, head, facts.fingerprint), source.flush)

    def _run_inline(self, drafter: Drafter, parallel: Parallel) -> None:
        job, config = self.job, self.job.config
        bins = bins_of(self.plan, *job.batches)
        states = open_states(
            config, job.spec, self.plan, job.device, bins=bins, share=job.ranks, activity=self.activity
        )
        self.link.send(Loaded(facts_of(states)))
        ring = MemoryRing(1, self.plan.token_budget, states.width, dtype=states.dtype, device=job.device)
        gate = StepGate(self.link, config.train.accumulation, self.profiler)
        source = InlineSource(
            self.plan,
            states,
            ring,
            may_take=gate,
            on_release=lambda index: self.link.send(Released(index)),
            doing=self.activity.enter,
        )
        trainer = self._trainer(drafter, source, parallel, states.embedding, states.head, states.fingerprint)
        self._train(trainer, lambda: None)
        if job.rank == 0 and config.decode_check_prompts and (gate.stop is None or gate.stop.check):
            self.activity.enter("checking")
            whole = load_drafter(open_checkpoint(job.checkpoints)).to(job.device)  # this rank may hold a part only
            tokenizer, prompts = load_tokenizer(config.target.model), config.decode_check_prompts
            self.link.send(check_by_decoding(states.target, whole, self.plan.prepared, tokenizer, prompts))

    def _reader(self, ring: SharedRing | RingShape) -> Reader:
        if isinstance(ring, SharedRing):
            return shared_reader(ring, self.job.rank, self.job.device)
        device_ring = DeviceRing(ring, self.job.device)
        self.link.send(RingReady(device_ring.handle))
        return device_ring

    def _warm_up(self) -> None:
        """While the target loads."""
        settings = step_settings(self.job.config, self.job.spec, self.job.device)
        if settings.fused_rows is not None:
            from draftmill.train.fused_step import warm_up

            self.activity.enter("compiling")
            warm_up(self.job.spec, settings, self.job.device)

    def _await_matrices(self) -> TargetFacts | None:
        self.activity.enter("waiting for the target")
        message = self.link.receive()
        return message.target if isinstance(message, Matrices) else None

    def _trainer(
        self, drafter: Drafter, source: BatchSource, parallel: Parallel, embedding: Tensor, head: Tensor, target: str
    ) -> Trainer:
        job, config = self.job, self.job.config
        self.activity.enter("compiling")
        trainer = Trainer(
            drafter,
            source,
            config.train,
            parallel=parallel,
            settings=step_settings(config, job.spec, job.device),
            total_steps=job.total_steps,
            embedding=embedding,
            head=head,
            folder=job.checkpoints,
            on_log=lambda values: self.link.send(Log(values)),
            on_save=lambda seconds: self.link.send(Saved(trainer.progress.step, seconds)),
            provenance={**job.identity, "target": config.target.model, "target_fingerprint": target},
            doing=self.activity.enter,
        )
        if job.rank == 0:
            say(f"step: {trainer.step.describe()}")
        if job.checkpoint is not None:
            self.activity.enter("loading", f"step {job.checkpoint.step}")
            trainer.resume(job.checkpoint)
        return trainer

    def _train(self, trainer: Trainer, flush: Callable[[], None]) -> None:
        with in_plain_words(RunFolder(self.job.checkpoints.parent)):
            finished = trainer.run()
        self.profiler.finish()
        flush()
        self.activity.enter("stopping")
        self.link.send(Ended(trainer.progress.step, finished))


@contextmanager
def parallel_ranks(job: DrafterJob, doing: Doing) -> Iterator[Parallel]:
    """Joins the ranks of the drafter for as long as they train. doing: is told when they meet."""
    if job.ranks == 1:
        yield Alone()
        return
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no other interface is needed, or asked for a name
    backend = "nccl" if job.device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, init_method=f"file://{job.rendezvous}", rank=job.rank, world_size=job.ranks)
    try:
        yield FullySharded(doing) if job.config.parallel == "fsdp" else DataParallel(doing=doing)
    finally:
        dist.destroy_process_group()
