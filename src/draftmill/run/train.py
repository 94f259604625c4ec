"""`draftmill train`: wires data, target, hand-off and trainer, and sees the run through."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from draftmill.config import RunConfig, dump_yaml
from draftmill.data.plan import BatchPlan
from draftmill.data.prepared import PreparedSet
from draftmill.data.tokenizer import load_tokenizer
from draftmill.drafter.config import DrafterSpec
from draftmill.drafter.model import Drafter, initialise
from draftmill.errors import UserError
from draftmill.handoff.memory import MemoryHandoff
from draftmill.run.files import RunFolder, write_atomically
from draftmill.run.inline import InlineSource
from draftmill.run.provenance import provenance
from draftmill.run.resolve import check_tokenizer, resolve_gamma, resolve_mask_token, resolve_spec
from draftmill.run.resume import changes, check_resumable
from draftmill.run.status import StatusWriter
from draftmill.run.stop import StopRequest
from draftmill.run.telemetry import Meter, Telemetry
from draftmill.target.capture import Target
from draftmill.target.reuse import ReusedStates
from draftmill.target.shape import load_config, read_shape
from draftmill.train.checkpoint import Checkpoint, find_latest, load_drafter
from draftmill.train.step import StepSettings
from draftmill.train.trainer import DivergedError, Trainer


@dataclass(frozen=True, slots=True)
class Built:
    """What a run needs, settled before the target's weights are loaded."""

    prepared: PreparedSet
    plan: BatchPlan
    tokenizer: Any
    spec: DrafterSpec
    device: str
    total_steps: int


def train(config: RunConfig, *, resume: bool) -> int:
    """Run to the end of the schedule or to a request to stop. Returns the exit code."""
    folder = RunFolder(config.run_dir)
    with folder.locked():
        checkpoint = _starting_point(folder, config, resume=resume)
        status = StatusWriter(folder)
        status.phase("loading")
        try:
            return _train(config, folder, status, checkpoint)
        except KeyboardInterrupt:
            status.phase("stopped", reason="interrupted before the first step or a second time")
            raise
        except BaseException as error:
            status.phase("failed", reason=str(error).splitlines()[0] if str(error) else type(error).__name__)
            raise


def _train(config: RunConfig, folder: RunFolder, status: StatusWriter, checkpoint: Checkpoint | None) -> int:
    torch.set_num_threads(config.threads or len(_cores()))
    built = build(config)
    _announce(config, built)
    _write_record(folder, config, built, checkpoint)
    say(f"loading target {config.target.model} …")
    started = time.perf_counter()
    target = Target(config.target, built.spec.taps, device=built.device)
    say(f"target loaded in {time.perf_counter() - started:.1f} s; documents kept apart by: {target.isolation}")
    drafter = _drafter(built, config.seed, checkpoint)
    stop = StopRequest(None if config.train.max_minutes is None else 60 * config.train.max_minutes)
    with stop.on_signals():
        finished = _loop(config, folder, status, built, target, drafter, checkpoint, stop)
    if finished or stop.exit_code == 0:
        _decode_check(config, status, built, drafter, target)
    return _conclude(config, folder, status, stop, finished)


def _loop(
    config: RunConfig,
    folder: RunFolder,
    status: StatusWriter,
    built: Built,
    target: Target,
    drafter: Drafter,
    checkpoint: Checkpoint | None,
    stop: StopRequest,
) -> bool:
    """Train; True when the schedule was completed."""
    handoff = MemoryHandoff(
        1,
        config.data.token_budget,
        target.features_width,
        dtype=target.dtype,
        device=built.device,
        target_fingerprint=target.fingerprint,
        taps=built.spec.taps,
    )
    source = InlineSource(built.plan, target, handoff, ReusedStates(int(config.target.reuse_states_gb * 1e9)))
    settings = StepSettings(
        anchors=config.anchors,
        gamma=resolve_gamma(config.train.gamma, built.spec.block_size),
        seed=config.seed,
        dtype=getattr(torch, config.train.dtype),
    )
    step = 0 if checkpoint is None else checkpoint.step
    telemetry = Telemetry(folder, status, Meter(built.total_steps), step)
    trainer = Trainer(
        drafter,
        source,
        config.train,
        settings=settings,
        total_steps=built.total_steps,
        embedding=target.embedding,
        head=target.head,
        folder=folder.checkpoints,
        on_log=telemetry.log,
        on_save=telemetry.saved,
        should_stop=stop,
        provenance={**_identity(config, built), "target_fingerprint": target.fingerprint},
    )
    if checkpoint is not None:
        trainer.resume(checkpoint)
    status.phase("training", total_steps=built.total_steps, step=step)
    stop.start_clock()
    try:
        return trainer.run()
    except (DivergedError, ArithmeticError) as error:
        raise UserError(f"the run stopped: {error}") from error
    finally:
        telemetry.close()


def build(config: RunConfig) -> Built:
    """Open the data, read the target's config and tokenizer, settle the drafter. Loads no weights."""
    device = choose_device(config.device)
    prepared = PreparedSet.open(config.data.prepared)
    shape = read_shape(load_config(config.target.model, trust_remote_code=config.target.trust_remote_code))
    tokenizer = load_tokenizer(config.target.model)
    check_tokenizer(prepared, tokenizer, config.target.model)
    mask_token_id, origin = resolve_mask_token(config.drafter.mask_token_id, tokenizer, shape.vocab_size, prepared)
    say(f"mask token: {mask_token_id} ({origin})")
    spec = resolve_spec(config.drafter, shape, mask_token_id)
    plan = BatchPlan(prepared, config.data.token_budget, config.seed)
    steps = max(1, config.train.epochs * plan.batches_per_epoch // config.train.accumulation)
    total = min(steps, config.train.max_steps or steps)
    return Built(prepared, plan, tokenizer, spec, device, total)


def say(text: str) -> None:
    """One plain line on stderr: what is going on now."""
    print(text, file=sys.stderr, flush=True)


def _starting_point(folder: RunFolder, config: RunConfig, *, resume: bool) -> Checkpoint | None:
    latest, rejected = find_latest(folder.checkpoints)
    for line in rejected:
        say(f"warning: checkpoint {line}; it is passed over")
    if not resume:
        if latest is not None or folder.metrics.exists():
            at = f"at step {latest.step}" if latest else "without a checkpoint"
            raise UserError(
                f"{folder.root} already holds a run {at}; add --resume to go on with it, or set another run_dir"
            )
        return None
    if latest is None:
        say(f"nothing to resume in {folder.root}: starting at step 0")
        folder.cut_metrics(0)
        return None
    say(f"resuming from {latest.path}")
    for line in changes(folder.config, config):
        say(f"config changed since the run began: {line}")
    folder.cut_metrics(latest.step)
    return latest


def _identity(config: RunConfig, built: Built) -> dict[str, Any]:
    """What a checkpoint says about where it comes from, beside its spec."""
    return {
        "target": config.target.model,
        "target_dtype": config.target.dtype,
        "data_fingerprint": built.prepared.info.fingerprint,
        "template_kwargs": built.prepared.info.template_kwargs,
        "seed": config.seed,
        "token_budget": config.data.token_budget,
        "anchors": config.anchors,
        "accumulation": config.train.accumulation,
    }


def _write_record(folder: RunFolder, config: RunConfig, built: Built, checkpoint: Checkpoint | None) -> None:
    """config.yaml and run.json, and before that the refusal of what cannot be resumed."""
    if checkpoint is not None:
        check_resumable(checkpoint, built.spec, _identity(config, built))
    write_atomically(folder.config, dump_yaml(config))
    record = {**provenance(), **_identity(config, built), "spec": built.spec.to_dict()}
    write_atomically(folder.provenance, json.dumps(record, indent=1))


def _drafter(built: Built, seed: int, checkpoint: Checkpoint | None) -> Drafter:
    if checkpoint is not None:
        return load_drafter(checkpoint).to(built.device)
    drafter = Drafter(built.spec)
    initialise(drafter, seed)
    return drafter.to(built.device)


def _announce(config: RunConfig, built: Built) -> None:
    spec, plan = built.spec, built.plan
    parameters = sum(p.numel() for p in _empty(spec).parameters())
    slot = config.data.token_budget * len(spec.taps) * spec.hidden_size * getattr(torch, config.target.dtype).itemsize
    print(dump_yaml(config), end="")
    say(
        f"drafter: {spec.layers} layers, block {spec.block_size}, taps {list(spec.taps)}, "
        f"{parameters / 1e6:.1f} M parameters\n"
        f"data: {len(built.prepared):,} documents in {plan.batches_per_epoch:,} batches of "
        f"{config.data.token_budget:,} tokens, {plan.padding_share:.1%} padding, {plan.cut_documents:,} cut, "
        f"{plan.left_out_documents:,} left out\n"
        f"schedule: {built.total_steps:,} steps of {config.train.accumulation} × {config.anchors} anchors on "
        f"{built.device}; hidden states: 1 slot × {slot / 1e6:.1f} MB"
    )


def _empty(spec: DrafterSpec) -> Drafter:
    with torch.device("meta"):
        return Drafter(spec)


def _decode_check(config: RunConfig, status: StatusWriter, built: Built, drafter: Drafter, target: Target) -> None:
    """A short real decode: does decoding accept what training promises?"""
    if config.decode_check_prompts == 0:
        return
    from draftmill.run.decode_check import decode_check, describe

    status.phase("checking")
    result = decode_check(target, drafter, built.prepared, built.tokenizer, config.decode_check_prompts)
    status.update(decode_check=None if result is None else result.to_dict())
    say(describe(result))


def _conclude(config: RunConfig, folder: RunFolder, status: StatusWriter, stop: StopRequest, finished: bool) -> int:
    latest, _ = find_latest(folder.checkpoints)
    assert latest is not None
    if finished:
        status.phase("finished", step=latest.step)
        say(f"finished: drafter at {latest.path}\nnext: draftmill evaluate {folder.root} --prompts FILE.jsonl")
        return 0
    status.phase("stopped", step=latest.step, reason=stop.reason)
    say(
        f"stopped at step {latest.step} of {latest.state['total_steps']}: {stop.reason}; saved in {latest.path}\n"
        f"go on: draftmill train {folder.config} --resume"
    )
    if stop.exit_code == 0:
        say(
            "warning: the schedule was cut, so the learning rate never reached its end; expect a slightly worse drafter"
        )
    return stop.exit_code


def choose_device(wanted: str) -> str:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError("device: cuda, but torch sees no CUDA device; use device=cpu or install a CUDA build of torch")
    return "cuda" if available and wanted != "cpu" else "cpu"


def _cores() -> set[int]:
    import os

    return os.sched_getaffinity(0)
