"""A run on one device: target and drafter take turns in this process."""

from __future__ import annotations

import time

import torch

from draftmill.drafter.model import Drafter, initialise
from draftmill.handoff.memory import MemoryRing
from draftmill.run.build import identity, say
from draftmill.run.decode_check import decode_check, describe
from draftmill.run.ledger import Ledger
from draftmill.run.session import Outcome, Session
from draftmill.run.sources import InlineSource
from draftmill.run.target_worker import step_settings
from draftmill.target.capture import Target
from draftmill.target.reuse import ReusedStates
from draftmill.train.checkpoint import load_drafter
from draftmill.train.parallel import Alone
from draftmill.train.trainer import Trainer


def run_alone(session: Session) -> Outcome:
    """Load, train, check. Returns where it ended."""
    config, built = session.config, session.built
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target = _load_target(session)
    session.write_record()
    drafter = _drafter(session)
    ledger = Ledger(session.folder.ledger, session.start_step * config.train.accumulation)
    with session.stop.on_signals(), session.telemetry() as telemetry:
        trainer = Trainer(
            drafter,
            _source(session, target, ledger),
            config.train,
            parallel=Alone(),
            settings=step_settings(config, built.spec),
            total_steps=built.total_steps,
            embedding=target.embedding,
            head=target.head,
            folder=session.folder.checkpoints,
            on_log=telemetry.log,
            on_save=telemetry.saved,
            provenance={
                **identity(config, built),
                "target": config.target.model,
                "target_fingerprint": target.fingerprint,
            },
        )
        if session.checkpoint is not None:
            trainer.resume(session.checkpoint)
        session.begin_training()
        finished = trainer.run()
    ledger.close()
    if session.stop.exit_code == 0:
        _decode_check(session, target, drafter)
    return Outcome(trainer.progress.step, finished)


def _load_target(session: Session) -> Target:
    session.status.phase("loading")
    say(f"loading target {session.config.target.model} …")
    started = time.perf_counter()
    target = Target(session.config.target, session.built.spec.taps, device=session.built.placement.drafters[0])
    session.check_target(target.fingerprint)
    say(f"target loaded in {time.perf_counter() - started:.1f} s; documents kept apart by: {target.isolation}")
    return target


def _drafter(session: Session) -> Drafter:
    device = session.built.placement.drafters[0]
    if session.checkpoint is not None:
        return load_drafter(session.checkpoint).to(device)
    drafter = Drafter(session.built.spec)
    initialise(drafter, session.config.seed)
    return drafter.to(device)


def _source(session: Session, target: Target, ledger: Ledger) -> InlineSource:
    ring = MemoryRing(
        1, session.config.data.token_budget, target.features_width, dtype=target.dtype, device=target.device
    )
    return InlineSource(
        session.built.plan,
        target,
        ring,
        ReusedStates(int(session.config.target.reuse_states_gb * 1e9)),
        may_take=lambda _index: not session.stop(),
        on_release=lambda index: ledger.trained(index, 0, None),
    )


def _decode_check(session: Session, target: Target, drafter: Drafter) -> None:
    """A short real decode: does decoding accept what training promises?"""
    prompts = session.config.decode_check_prompts
    if prompts == 0:
        return
    session.status.phase("checking")
    result = decode_check(target, drafter, session.built.prepared, session.built.tokenizer, prompts)
    session.status.update(decode_check=None if result is None else result.to_dict())
    say(describe(result))
