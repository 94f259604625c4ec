"""A run on one device: target and drafter take turns in this process."""

from __future__ import annotations

import torch

from draftmill.drafter.model import Drafter, initialise
from draftmill.handoff.memory import MemoryRing
from draftmill.run.build import identity, say
from draftmill.run.decode_check import decode_check, describe
from draftmill.run.ledger import Ledger
from draftmill.run.session import Outcome, Session
from draftmill.run.sources import InlineSource
from draftmill.run.states import States, bins_of, open_states
from draftmill.run.target_worker import NO_TARGET_TO_CHECK, step_settings
from draftmill.target.capture import Target
from draftmill.train.checkpoint import load_drafter
from draftmill.train.parallel import Alone
from draftmill.train.trainer import Trainer


def run_alone(session: Session) -> Outcome:
    """Load, train, check. Returns where it ended."""
    config, built = session.config, session.built
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    states = _load(session)
    session.write_record()
    drafter = _drafter(session)
    ledger = Ledger(session.folder.ledger, session.start_step * config.train.accumulation)
    with session.stop.on_signals(), session.telemetry() as telemetry:
        trainer = Trainer(
            drafter,
            _source(session, states, ledger),
            config.train,
            parallel=Alone(),
            settings=step_settings(config, built.spec),
            total_steps=built.total_steps,
            embedding=states.embedding,
            head=states.head,
            folder=session.folder.checkpoints,
            on_log=telemetry.log,
            on_save=telemetry.saved,
            provenance={
                **identity(config, built),
                "target": config.target.model,
                "target_fingerprint": states.fingerprint,
            },
        )
        if session.checkpoint is not None:
            trainer.resume(session.checkpoint)
        session.begin_training()
        finished = trainer.run()
    ledger.close()
    if session.stop.exit_code == 0:
        _decode_check(session, states.target, drafter)
    return Outcome(trainer.progress.step, finished)


def _load(session: Session) -> States:
    session.status.phase("loading")
    config, built = session.config, session.built
    steps = config.train.accumulation
    bins = bins_of(built.plan, session.start_step * steps, built.total_steps * steps)
    states = open_states(config, built.spec, built.plan, built.placement.drafters[0], bins=bins)
    session.check_target(states.fingerprint)
    return states


def _drafter(session: Session) -> Drafter:
    device = session.built.placement.drafters[0]
    if session.checkpoint is not None:
        return load_drafter(session.checkpoint).to(device)
    drafter = Drafter(session.built.spec)
    initialise(drafter, session.config.seed)
    return drafter.to(device)


def _source(session: Session, states: States, ledger: Ledger) -> InlineSource:
    device = session.built.placement.drafters[0]
    ring = MemoryRing(1, session.config.data.token_budget, states.width, dtype=states.dtype, device=device)
    return InlineSource(
        session.built.plan,
        states,
        ring,
        may_take=lambda _index: not session.stop(),
        on_release=lambda index: ledger.trained(index, 0, None),
    )


def _decode_check(session: Session, target: Target | None, drafter: Drafter) -> None:
    """A short real decode: does decoding accept what training promises?"""
    prompts = session.config.decode_check_prompts
    if prompts == 0:
        return
    if target is None:
        say(NO_TARGET_TO_CHECK)
        return
    session.status.phase("checking")
    result = decode_check(target, drafter, session.built.prepared, session.built.tokenizer, prompts)
    session.status.update(decode_check=None if result is None else result.to_dict())
    say(describe(result))
