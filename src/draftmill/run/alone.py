"""A run on one device: target and drafter take turns in this process."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import torch

from draftmill.handoff.memory import MemoryRing
from draftmill.run.activity import Activity
from draftmill.run.build import identity
from draftmill.run.console import say
from draftmill.run.job import check_by_decoding, starting_drafter, step_settings
from draftmill.run.ledger import Ledger
from draftmill.run.profiling import Profiler, listening
from draftmill.run.session import Outcome, Session, in_plain_words
from draftmill.run.sources import InlineSource
from draftmill.run.states import States, bins_of, open_states
from draftmill.run.watchdog import NAME, Watchdog
from draftmill.train.parallel import Alone
from draftmill.train.trainer import Trainer


def run_alone(session: Session) -> Outcome:
    """Load, train, check. Returns where it ended."""
    root, device = session.folder.root, session.built.placement.drafters[0]
    with Watchdog(root, session.config.target.model, device, session.status, session.events) as activity:
        return _run(session, activity)


def _run(session: Session, activity: Activity) -> Outcome:
    config, built = session.config, session.built
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    states = _load(session, activity)
    session.write_record()
    device = built.placement.drafters[0]
    activity.enter("loading", "the drafter")
    drafter = starting_drafter(session.checkpoint, built.spec, config.seed, device)
    session.status.phase("compiling")
    activity.enter("compiling")
    ledger = Ledger(session.folder.ledger, session.start_step * config.train.accumulation)
    telemetry = session.telemetry(session.start_step)
    profiler = Profiler(NAME, "target and drafter", "steps", device, activity.enter)
    noted = partial(session.events.add, "profile")

    def saved(seconds: float) -> None:
        telemetry.saved(seconds)
        session.saved(trainer.progress.step, seconds)

    with session.stop.on_signals(), closing(ledger), closing(telemetry), in_plain_words(session.folder):
        trainer = Trainer(
            drafter,
            _source(session, states, ledger, activity, profiler),
            config.train,
            parallel=Alone(),
            settings=step_settings(config, built.spec, device),
            total_steps=built.total_steps,
            embedding=states.embedding,
            head=states.head,
            folder=session.folder.checkpoints,
            on_log=telemetry.log,
            on_save=saved,
            provenance={
                **identity(config, built),
                "target": config.target.model,
                "target_fingerprint": states.fingerprint,
            },
            doing=activity.enter,
        )
        say(f"step: {trainer.step.describe()}")
        if session.checkpoint is not None:
            activity.enter("loading", f"step {session.checkpoint.step}")
            trainer.resume(session.checkpoint)
        session.begin_training()
        with listening(session.folder, profiler, noted):
            finished = trainer.run()
        ledger.ended(trainer.progress.step * config.train.accumulation)
    if config.decode_check_prompts and session.stop.exit_code == 0:
        session.status.phase("checking")
        activity.enter("checking")
        prompts = config.decode_check_prompts
        session.checked(check_by_decoding(states.target, drafter, built.prepared, built.tokenizer, prompts))
    activity.enter("stopping")
    return Outcome(trainer.progress.step, finished)


def _load(session: Session, activity: Activity) -> States:
    session.status.phase("loading")
    config, built = session.config, session.built
    steps = config.train.accumulation
    bins = bins_of(built.plan, session.start_step * steps, built.total_steps * steps)
    states = open_states(config, built.spec, built.plan, built.placement.drafters[0], bins=bins, activity=activity)
    session.check_target(states.fingerprint)
    return states


def _source(session: Session, states: States, ledger: Ledger, activity: Activity, profiler: Profiler) -> InlineSource:
    def may_take(index: int) -> bool:
        profiler.at(index // session.config.train.accumulation)
        return not session.stop()

    device = session.built.placement.drafters[0]
    ring = MemoryRing(1, session.config.data.token_budget, states.width, dtype=states.dtype, device=device)
    return InlineSource(
        session.built.plan,
        states,
        ring,
        may_take=may_take,
        on_release=lambda index: ledger.trained(index, 0, None),
        doing=activity.enter,
    )
