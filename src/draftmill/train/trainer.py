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
from draftmill.train.optim import Update, apply_update, learning_rate, make_optimizer
from draftmill.train.parallel import Doing, Parallel, nobody
from draftmill.train.step import StepSettings, make_step

MAX_SKIPS_IN_A_ROW = 10


class DivergedError(RuntimeError):
    """Ten updates in a row had a non-finite gradient."""


COUNTS = ("skipped", "skipped_in_a_row", "context_tokens", "pending_steps")


@dataclass
class Progress:
    """Everything that moves, beside weights and optimizer. `step` counts finished optimizer steps, skipped ones too.

    What depends on a gradient stays on the device until it is logged or saved. counts: int64, by COUNTS. pending: sums
    of the `pending_steps` updates since the last line of the log.
    """

    counts: Tensor
    pending: Sums
    step: int = 0
    last: dict[str, Any] = field(default_factory=dict)

    def count(self) -> dict[str, int]:
        """Waits for the device."""
        return dict(zip(COUNTS, self.counts.tolist(), strict=True))

    def add(self, update: Update, sums: Sums, tokens: Tensor) -> None:
        """Note an update: a skipped one adds nothing to the pending sums."""
        bad = ~torch.isfinite(update.norm)  # without any anchor there is no update either, but the norm is 0
        skipped, in_a_row, seen, steps = self.counts
        in_a_row = torch.where(bad, in_a_row + 1, 0)
        self.counts = torch.stack((skipped + bad, in_a_row, seen + tokens, steps + update.done))
        parts = zip((self.pending.slots, self.pending.totals), (sums.slots, sums.totals), strict=True)
        self.pending = Sums(*(torch.where(update.done, old + new, old) for old, new in parts))
        self.step += 1


class Trainer:
    """Consumes batch (s·A + a)·R + r at optimizer step s, micro-step a of A, rank r of R; A·R is `accumulation`.

    On rank 0 on_log gets one dict per logging interval, on_save the seconds a checkpoint took. doing is told what is
    done now. The source may end the run before any batch; that throws the unfinished step away, which changes nothing:
    it is computed again, from the same batches and anchors, by whoever goes on.
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
        doing: Doing = nobody,
    ) -> None:
        self.drafter, self.source, self.config = drafter, source, config
        self.settings, self.total_steps = settings, total_steps
        self.device = embedding.device
        self.folder, self.provenance = folder, provenance
        self.on_log, self.on_save, self.doing = on_log, on_save, doing
        self.parallel = parallel
        self.micro_steps, rest = divmod(config.accumulation, parallel.ranks)
        assert rest == 0, "the ranks share a step's batches evenly"
        parallel.prepare(drafter, by_autograd=settings.fused_rows is None)
        self.parameters = list(drafter.parameters())
        self.step = make_step(drafter, embedding, head, settings, always_run=parallel.always_run)
        self.optimizer = make_optimizer(self.parameters, config)
        self.progress = Progress(torch.zeros(len(COUNTS), dtype=torch.int64, device=self.device), self._no_sums())
        self._in_a_row = torch.zeros((), dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on behind a checkpoint. The drafter's weights must have been loaded from it already."""
        load_optimizer(checkpoint, self.optimizer, self.parallel.part)
        saved = checkpoint.state["progress"]
        slots, totals = (
            torch.tensor(saved[key], dtype=torch.float64, device=self.device)
            for key in ("pending_slots", "pending_totals")
        )
        counts = torch.tensor([saved[name] for name in COUNTS], device=self.device)
        self.progress = Progress(counts, Sums(slots, totals), saved["step"], saved["last"])
        self.step.updated()

    def run(self) -> bool:
        """Train to the end of the schedule: True. False when the source ended the run before. Saves in both cases."""
        saved_at = None
        while self.progress.step < self.total_steps:
            summed = self._accumulate()
            if summed is None:
                break
            self._update(*summed)
            if self.progress.step % self.config.save_every == 0:
                self.save()
                saved_at = self.progress.step
        if saved_at != self.progress.step:
            self.save()
        return self.progress.step >= self.total_steps

    def save(self) -> None:
        """Write a checkpoint: rank 0 alone, of what all hold together."""
        if self.parallel.rank == 0 or self.parallel.always_run:  # another one that holds all has nothing to do here
            self.doing("saving", f"step {self.progress.step}")
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
        saved = {
            "step": p.step,
            **p.count(),
            "last": p.last,
            "pending_slots": p.pending.slots.tolist(),
            "pending_totals": p.pending.totals.tolist(),
        }
        return {"progress": saved, "total_steps": self.total_steps, **self.provenance}

    def _accumulate(self) -> tuple[Sums, Tensor] | None:
        """Gradients, sums and context tokens of one optimizer step over all ranks, or None when the source ended the
        run in it."""
        sums, tokens = self._no_sums(), 0
        rank, ranks = self.parallel.rank, self.parallel.ranks
        for number in range(self.micro_steps):
            index = (self.progress.step * self.micro_steps + number) * ranks + rank
            batch = self.source.take(index)
            if batch is None:
                self.parallel.discard()
                self.step.clear()
                return None
            self.doing("micro-step", f"batch {index}")
            with self.parallel.micro_step(last=number == self.micro_steps - 1):
                sums = sums + self.step(batch)
            tokens += batch.tokens.tokens
            self.source.release(index)
        return self.parallel.total(sums, torch.full((), tokens, dtype=torch.int64, device=self.device))

    def _update(self, sums: Sums, tokens: Tensor) -> None:
        p, c = self.progress, self.config
        self.doing("update", f"step {p.step + 1}")
        lr = learning_rate(p.step, self.total_steps, c.lr, c.warmup_ratio)
        update = apply_update(self.parameters, self.optimizer, weight=sums.totals[1], lr=lr, clip=c.clip)
        self.step.updated()
        self.step.clear()
        p.add(update, sums, tokens)
        if p.step % c.log_every == 0 or p.step == self.total_steps:
            self._log(lr, float(update.norm))
        self._check_divergence()

    def _check_divergence(self) -> None:
        """On a GPU the host looks at what has arrived so far, some steps ago, and does not wait."""
        self._in_a_row.copy_(self.progress.counts[COUNTS.index("skipped_in_a_row")], non_blocking=True)
        if int(self._in_a_row) >= MAX_SKIPS_IN_A_ROW:
            raise DivergedError(
                f"{MAX_SKIPS_IN_A_ROW} updates in a row had a non-finite gradient (up to step {self.progress.step}); "
                "the weights are those before them. Lower train.lr, or look for bad hidden states"
            )

    def _log(self, lr: float, norm: float) -> None:
        p, counts = self.progress, self.progress.count()
        values = summarise(p.pending)  # None for all where every update of the interval was skipped
        p.last = {
            "step": p.step,
            "lr": lr,
            "gradient_norm": norm if math.isfinite(norm) else None,
            "skipped": counts["skipped"],
            **(values if counts["pending_steps"] else dict.fromkeys(values)),
        }
        if self.parallel.rank == 0:
            averaged = counts["pending_steps"]
            self.on_log({**p.last, "context_tokens": counts["context_tokens"], "averaged_steps": averaged})
        p.pending = self._no_sums()
        p.counts[COUNTS.index("pending_steps")] = 0

    def _no_sums(self) -> Sums:
        return zero_sums(self.drafter.spec.block_size, self.device)
