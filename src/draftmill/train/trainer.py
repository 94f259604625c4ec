"""The training loop. It knows batches by index and nothing of where they come from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftmill.drafter.metrics import Sums, summarise, zero_sums
from draftmill.drafter.model import Drafter
from draftmill.handoff.interface import BatchSource
from draftmill.train.checkpoint import Checkpoint, load_optimizer, optimizer_tensors, save_checkpoint
from draftmill.train.config import TrainConfig
from draftmill.train.optim import apply_update, learning_rate, make_optimizer
from draftmill.train.parallel import Parallel
from draftmill.train.step import StepSettings, micro_step

MAX_SKIPS_IN_A_ROW = 10


class DivergedError(RuntimeError):
    """Ten updates in a row had a non-finite gradient."""


@dataclass
class Progress:
    """Everything that moves, beside weights and optimizer. `step` counts finished optimizer steps, skipped ones too."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    context_tokens: int = 0
    pending: Sums | None = None
    pending_steps: int = 0
    last: dict[str, Any] = field(default_factory=dict)


class Trainer:
    """Consumes batch (s·A + a)·R + r at optimizer step s, micro-step a of A, rank r of R; A·R is `accumulation`.

    On rank 0 on_log gets one dict per logging interval, on_save the seconds a checkpoint took. The source may end the
    run before any batch; that throws the unfinished step away, which changes nothing: it is computed again, from the
    same batches and anchors, by whoever goes on.
    """

    def __init__(
        self,
        drafter: Drafter,
        source: BatchSource,
        config: TrainConfig,
        *,
        parallel: Parallel,
        settings: StepSettings,
        total_steps: int,
        embedding: Tensor,
        head: Tensor,
        folder: Path,
        on_log: Callable[[dict[str, Any]], None],
        on_save: Callable[[float], None],
        provenance: dict[str, Any],
    ) -> None:
        self.drafter, self.source, self.config = drafter, source, config
        self.settings, self.total_steps = settings, total_steps
        self.embedding, self.head = embedding.to(settings.dtype), head.to(settings.dtype)
        self.folder, self.provenance = folder, provenance
        self.on_log, self.on_save = on_log, on_save
        self.parallel = parallel
        self.micro_steps, rest = divmod(config.accumulation, parallel.ranks)
        assert rest == 0, "the ranks share a step's batches evenly"
        parallel.prepare(drafter)
        self.parameters = list(drafter.parameters())
        self.optimizer = make_optimizer(self.parameters, config)
        self.progress = Progress(pending=self._no_sums())

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on behind a checkpoint. The drafter's weights must have been loaded from it already."""
        load_optimizer(checkpoint, self.optimizer, self.parallel.part)
        saved = dict(checkpoint.state["progress"])
        device = self.embedding.device
        slots, totals = (
            torch.tensor(saved.pop(key), dtype=torch.float64, device=device)
            for key in ("pending_slots", "pending_totals")
        )
        self.progress = Progress(**saved, pending=Sums(slots, totals))

    def run(self) -> bool:
        """Train to the end of the schedule: True. False when the source ended the run before. Saves in both cases."""
        saved_at = None
        while self.progress.step < self.total_steps:
            sums = self._accumulate()
            if sums is None:
                break
            self._update(sums)
            if self.progress.step % self.config.save_every == 0:
                self.save()
                saved_at = self.progress.step
        if saved_at != self.progress.step:
            self.save()
        return self.progress.step >= self.total_steps

    def save(self) -> None:
        """Write a checkpoint: rank 0 alone, of what all hold together."""
        started = time.perf_counter()
        weights = self.parallel.whole(self.drafter.state_dict())
        moments = self.parallel.whole(optimizer_tensors(self.optimizer))
        if self.parallel.rank != 0:
            return
        p = self.progress
        save_checkpoint(self.folder, p.step, self.drafter.spec, weights, moments, self._state(), keep=self.config.keep)
        self.on_save(time.perf_counter() - started)

    def _state(self) -> dict[str, Any]:
        p = self.progress
        assert p.pending is not None
        saved = {
            "step": p.step,
            "skipped": p.skipped,
            "skipped_in_a_row": p.skipped_in_a_row,
            "context_tokens": p.context_tokens,
            "pending_steps": p.pending_steps,
            "last": p.last,
            "pending_slots": p.pending.slots.tolist(),
            "pending_totals": p.pending.totals.tolist(),
        }
        return {"progress": saved, "total_steps": self.total_steps, **self.provenance}

    def _accumulate(self) -> Sums | None:
        """Gradients and sums of one optimizer step over all ranks, or None when the source ended the run in it."""
        sums, tokens = self._no_sums(), 0
        rank, ranks = self.parallel.rank, self.parallel.ranks
        for number in range(self.micro_steps):
            index = (self.progress.step * self.micro_steps + number) * ranks + rank
            batch = self.source.take(index)
            if batch is None:
                self.parallel.discard()
                self.optimizer.zero_grad(set_to_none=True)
                return None
            with self.parallel.micro_step(last=number == self.micro_steps - 1):
                sums = sums + micro_step(
                    self.drafter,
                    batch,
                    embedding=self.embedding,
                    head=self.head,
                    settings=self.settings,
                    always_run=self.parallel.always_run,
                )
            tokens += batch.tokens.tokens
            self.source.release(index)
        sums, tokens = self.parallel.total(sums, tokens)
        self.progress.context_tokens += tokens
        return sums

    def _update(self, sums: Sums) -> None:
        p, c = self.progress, self.config
        lr = learning_rate(p.step, self.total_steps, c.lr, c.warmup_ratio)
        norm, done = apply_update(self.parameters, self.optimizer, weight=sums.totals[1], lr=lr, clip=c.clip)
        bad = not math.isfinite(norm)  # without any anchor there is no update either, but the norm is 0
        p.step += 1
        p.skipped += bad
        p.skipped_in_a_row = p.skipped_in_a_row + 1 if bad else 0
        if done:
            assert p.pending is not None
            p.pending, p.pending_steps = p.pending + sums, p.pending_steps + 1
        if p.step % c.log_every == 0 or p.step == self.total_steps:
            self._log(lr, norm)
        if p.skipped_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise DivergedError(
                f"{MAX_SKIPS_IN_A_ROW} updates in a row had a non-finite gradient (up to step {p.step}); the weights "
                "are those before them. Lower train.lr, or look for bad hidden states"
            )

    def _log(self, lr: float, norm: float) -> None:
        p = self.progress
        assert p.pending is not None
        p.last = {
            "step": p.step,
            "lr": lr,
            "gradient_norm": norm if math.isfinite(norm) else None,
            "skipped": p.skipped,
            **self._averages(),
        }
        if self.parallel.rank == 0:
            self.on_log({**p.last, "context_tokens": p.context_tokens, "averaged_steps": p.pending_steps})
        p.pending, p.pending_steps = self._no_sums(), 0

    def _averages(self) -> dict[str, Any]:
        """Metrics of the interval; None where every update in it was skipped."""
        assert self.progress.pending is not None
        values = summarise(self.progress.pending)
        return dict(values) if self.progress.pending_steps else dict.fromkeys(values)

    def _no_sums(self) -> Sums:
        return zero_sums(self.drafter.spec.block_size, self.embedding.device)
