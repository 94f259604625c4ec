"""`devices: auto` on a host with several GPUs: measure both sides on one of them, then share the devices out."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from draftmill.config import RunConfig
from draftmill.data.plan import BatchPlan
from draftmill.data.prepared import PreparedSet
from draftmill.drafter.config import DrafterSpec
from draftmill.errors import UserError
from draftmill.records import HiddenBatch
from draftmill.run.job import starting_drafter, step_settings
from draftmill.run.placement import Placement
from draftmill.target.capture import Target
from draftmill.train.optim import apply_update, make_optimizer
from draftmill.train.step import make_step

BATCHES = 3  # measured of each side, after one to warm up


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds a batch costs either side on one device. together: whether both fit one device at once."""

    target_seconds: float
    drafter_seconds: float
    together: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """batches_per_second: what the slower side allows. idle: devices that nothing is left for."""

    placement: Placement
    batches_per_second: float
    idle: int


def share_out(devices: tuple[str, ...], measured: Measured, accumulation: int) -> Choice:
    """The fastest use of the devices. The number of drafter ranks must divide `accumulation`.

    Where both sides fit one device, each device does both: no side can wait for the other. That loses to a split only
    when `accumulation` allows fewer ranks than there are devices.
    """
    both = measured.target_seconds + measured.drafter_seconds
    choices = []
    for ranks in (n for n in range(len(devices), 0, -1) if accumulation % n == 0):
        if measured.together:
            choices.append(Choice(Placement((), devices[:ranks]), ranks / both, len(devices) - ranks))
        if targets := len(devices) - ranks:
            rate = min(targets / measured.target_seconds, ranks / measured.drafter_seconds)
            choices.append(Choice(Placement(devices[:targets], devices[targets:]), rate, 0))
    if not choices:
        raise UserError(
            "devices: target and drafter do not fit one GPU together; a split needs at least two GPUs, or a smaller "
            "data.token_budget"
        )
    return max(choices, key=lambda choice: choice.batches_per_second)  # the first of equals: inline, more ranks


def explain(choice: Choice, measured: Measured) -> list[str]:
    """Lines for the console: what was measured, what follows, what would be better."""
    fit = "both fit one device" if measured.together else "together they do not fit one device"
    lines = [
        f"measured on one device: target {measured.target_seconds:.3g} s, drafter {measured.drafter_seconds:.3g} s a "
        f"batch; {fit}",
        f"devices: auto takes {choice.placement.describe()} (about {choice.batches_per_second:.3g} batches a second)",
    ]
    if choice.idle:
        more = choice.idle + choice.placement.ranks
        lines.append(
            f"warning: {choice.idle} devices stay idle, because train.accumulation lets only {choice.placement.ranks} "
            f"ranks share a step evenly; train.accumulation={more} would use all"
        )
    return lines


def measure(config: RunConfig, spec: DrafterSpec, device: str) -> Measured:
    """In a process of its own, so that no memory stays behind. UserError where even one side does not fit."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_measure, args=(theirs, config, spec, device))
    process.start()
    theirs.close()
    try:
        result: Measured | str = ours.recv()
    except EOFError:
        result = "the measuring process ended without a result"
    finally:
        process.join()
    if isinstance(result, str):
        raise UserError(f"devices: auto could not measure on {device}: {result}. Name the devices yourself")
    return result


def _measure(connection: Connection, config: RunConfig, spec: DrafterSpec, device: str) -> None:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    try:
        connection.send(measure_here(config, spec, device))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}".splitlines()[0])


def measure_here(config: RunConfig, spec: DrafterSpec, device: str) -> Measured:
    """First the target alone, then the drafter beside it; alone, if that is too much."""
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    plan = BatchPlan(PreparedSet.open(config.data.prepared), config.data.token_budget, config.seed)
    tokens = [plan.batch(index) for index in range(BATCHES + 1)]
    target: Target | None = Target(config.target, spec.taps, device=device)
    assert target is not None
    features = torch.zeros(plan.token_budget, target.features_width, dtype=target.dtype, device=device)
    target_seconds = _seconds([lambda b=batch: target.capture(b, features) for batch in tokens], device)  # type: ignore[misc]
    embedding, head, fingerprint = target.embedding, target.head, target.fingerprint
    steps = [HiddenBatch(batch, features, fingerprint, spec.taps) for batch in tokens]
    drafter_seconds = _drafter_seconds(config, spec, device, steps, embedding, head)
    if drafter_seconds is not None:
        return Measured(target_seconds, drafter_seconds, together=True)
    target = None
    gc.collect()
    torch.cuda.empty_cache()
    alone = _drafter_seconds(config, spec, device, steps, embedding, head)
    if alone is None:
        raise UserError("the drafter alone does not fit; lower data.token_budget or train.anchors")
    return Measured(target_seconds, alone, together=False)


def _drafter_seconds(
    config: RunConfig, spec: DrafterSpec, device: str, batches: list[HiddenBatch], embedding: Tensor, head: Tensor
) -> float | None:
    """None when it does not fit. Nothing of the try stays behind then: the error, which holds it all, ends here."""
    try:
        step = drafter_step(config, spec, device, embedding, head)
        return _seconds([lambda b=batch: step(b) for batch in batches], device)  # type: ignore[misc]
    except (torch.OutOfMemoryError, UserError):
        return None


def drafter_step(
    config: RunConfig, spec: DrafterSpec, device: str, embedding: Tensor, head: Tensor
) -> Callable[[HiddenBatch], None]:
    """A fresh drafter's micro-step and update, as a function of a batch; its weights do not change."""
    drafter = starting_drafter(None, spec, config.seed, device)
    parameters = list(drafter.parameters())
    optimizer = make_optimizer(parameters, config.train)
    micro_step = make_step(drafter, embedding, head, step_settings(config, spec, device))

    def step(batch: HiddenBatch) -> None:
        sums = micro_step(batch)
        apply_update(parameters, optimizer, weight=sums.totals[1], lr=0.0, clip=1.0)
        micro_step.updated()
        micro_step.clear()

    return step


def _seconds(calls: list[Callable[[], None]], device: str) -> float:
    """Mean of all but the first, which warms up."""
    calls[0]()
    _synchronise(device)
    started = time.perf_counter()
    for call in calls[1:]:
        call()
    _synchronise(device)
    return (time.perf_counter() - started) / (len(calls) - 1)


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
