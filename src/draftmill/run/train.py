"""`draftmill train`: wires data, target, hand-off and trainer, and sees the run through."""

from __future__ import annotations

import errno
import json
import time

import torch

from draftmill.config import RunConfig, dump_yaml
from draftmill.drafter.model import Drafter, initialise
from draftmill.errors import UserError
from draftmill.handoff.memory import MemoryHandoff
from draftmill.run.build import Built, announce, build, identity, say
from draftmill.run.decode_check import decode_check, describe
from draftmill.run.files import RunFolder, write_atomically
from draftmill.run.inline import InlineSource
from draftmill.run.provenance import provenance
from draftmill.run.resolve import resolve_gamma
from draftmill.run.resume import check_same_run, check_same_target, starting_point
from draftmill.run.status import StatusWriter
from draftmill.run.stop import StopRequest
from draftmill.run.telemetry import Meter, Telemetry
from draftmill.target.capture import Target
from draftmill.target.reuse import ReusedStates
from draftmill.train.checkpoint import Checkpoint, find_latest, load_drafter
from draftmill.train.step import StepSettings
from draftmill.train.trainer import DivergedError, Trainer


def train(config: RunConfig, *, resume: bool) -> int:
    """Run to the end of the schedule or to a request to stop. Returns the exit code."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = RunFolder(config.run_dir)
    with folder.locked():
        checkpoint = starting_point(folder, config, resume=resume)
        built = build(config)
        if checkpoint is not None:
            check_same_run(checkpoint, built.spec, identity(config, built))
        status = StatusWriter(folder)
        try:
            return _Run(config, folder, built, status, checkpoint).run()
        except KeyboardInterrupt:
            status.phase("stopped", reason=f"interrupted while {status.current}")
            raise
        except BaseException as error:
            status.phase("failed", reason=str(error).splitlines()[0] if str(error) else type(error).__name__)
            raise


class _Run:
    """One process, one device, from loading to the last line."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        built: Built,
        status: StatusWriter,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.config, self.folder, self.built, self.status = config, folder, built, status
        self.checkpoint = checkpoint
        limit = config.train.max_minutes
        self.stop = StopRequest(None if limit is None else 60 * limit)

    def run(self) -> int:
        announce(self.config, self.built)
        target = self._load_target()
        self._write_record()
        drafter = self._drafter()
        with self.stop.on_signals():
            finished = self._train(target, drafter)
        if self.stop.exit_code == 0:
            self._decode_check(target, drafter)
        return self._conclude(finished)

    def _load_target(self) -> Target:
        self.status.phase("loading")
        say(f"loading target {self.config.target.model} …")
        started = time.perf_counter()
        target = Target(self.config.target, self.built.spec.taps, device=self.built.device)
        if self.checkpoint is not None:
            check_same_target(self.checkpoint, target.fingerprint)
        say(f"target loaded in {time.perf_counter() - started:.1f} s; documents kept apart by: {target.isolation}")
        return target

    def _write_record(self) -> None:
        """config.yaml, run.json, and metrics without the steps that are made again."""
        write_atomically(self.folder.config, dump_yaml(self.config))
        spec = self.built.spec.to_dict()
        record = {**provenance(), "target": self.config.target.model, **identity(self.config, self.built), "spec": spec}
        write_atomically(self.folder.provenance, json.dumps(record, indent=1))
        self.folder.cut_metrics(self._start_step())

    def _start_step(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.step

    def _drafter(self) -> Drafter:
        if self.checkpoint is not None:
            return load_drafter(self.checkpoint).to(self.built.device)
        drafter = Drafter(self.built.spec)
        initialise(drafter, self.config.seed)
        return drafter.to(self.built.device)

    def _source(self, target: Target) -> InlineSource:
        handoff = MemoryHandoff(
            1,
            self.config.data.token_budget,
            target.features_width,
            dtype=target.dtype,
            device=self.built.device,
            target_fingerprint=target.fingerprint,
            taps=self.built.spec.taps,
        )
        reuse = ReusedStates(int(self.config.target.reuse_states_gb * 1e9))
        return InlineSource(self.built.plan, target, handoff, reuse)

    def _train(self, target: Target, drafter: Drafter) -> bool:
        """True when the schedule was completed."""
        telemetry = Telemetry(self.folder, self.status, Meter(self.built.total_steps), self._start_step())
        trainer = self._trainer(target, drafter, telemetry)
        if self.checkpoint is not None:
            trainer.resume(self.checkpoint)
        self.status.phase("training", total_steps=self.built.total_steps, step=self._start_step())
        self.stop.start_clock()
        try:
            return trainer.run()
        except (DivergedError, ArithmeticError) as error:
            raise UserError(f"the run stopped: {error}") from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            latest, _ = find_latest(self.folder.checkpoints)
            kept = "nothing was saved yet" if latest is None else f"{latest.path} is complete"
            raise UserError(
                f"the disk of {self.folder.root} is full; {kept}. Free space, then go on with --resume"
            ) from error
        finally:
            telemetry.close()

    def _trainer(self, target: Target, drafter: Drafter, telemetry: Telemetry) -> Trainer:
        config, built = self.config, self.built
        settings = StepSettings(
            anchors=config.anchors,
            gamma=resolve_gamma(config.train.gamma, built.spec.block_size),
            seed=config.seed,
            dtype=getattr(torch, config.train.dtype),
        )
        made_of = {"target": config.target.model, "target_fingerprint": target.fingerprint}
        return Trainer(
            drafter,
            self._source(target),
            config.train,
            settings=settings,
            total_steps=built.total_steps,
            embedding=target.embedding,
            head=target.head,
            folder=self.folder.checkpoints,
            on_log=telemetry.log,
            on_save=telemetry.saved,
            should_stop=self.stop,
            provenance={**identity(config, built), **made_of},
        )

    def _decode_check(self, target: Target, drafter: Drafter) -> None:
        """A short real decode: does decoding accept what training promises?"""
        if self.config.decode_check_prompts == 0:
            return
        self.status.phase("checking")
        prompts = self.config.decode_check_prompts
        result = decode_check(target, drafter, self.built.prepared, self.built.tokenizer, prompts)
        self.status.update(decode_check=None if result is None else result.to_dict())
        say(describe(result))

    def _conclude(self, finished: bool) -> int:
        latest, _ = find_latest(self.folder.checkpoints)
        assert latest is not None
        if finished:
            self.status.phase("finished", step=latest.step)
            say(f"finished: drafter at {latest.path}")
            say(f"next: draftmill evaluate {self.folder.root} --prompts FILE.jsonl")
            return 0
        self.status.phase("stopped", step=latest.step, reason=self.stop.reason)
        say(f"stopped at step {latest.step} of {self.built.total_steps}: {self.stop.reason}; saved in {latest.path}")
        say(f"go on: draftmill train {self.folder.config} --resume")
        if self.stop.exit_code == 0:
            say("warning: the schedule was cut before the learning rate reached its end; the drafter suffers for it")
        return self.stop.exit_code
