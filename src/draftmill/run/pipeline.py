"""A run of several processes: what each is told, and what the run does with what they say."""

from __future__ import annotations

from typing import Any

import torch

from draftmill.errors import UserError
from draftmill.handoff.device import reachable
from draftmill.handoff.matrices import SharedMatrices
from draftmill.handoff.shared import RingShape, SharedRing, check_room
from draftmill.run import stacks
from draftmill.run.build import identity
from draftmill.run.console import say
from draftmill.run.coordinator import Coordinator
from draftmill.run.drafter_worker import DrafterJob
from draftmill.run.drafters import DrafterGroup
from draftmill.run.hooks import Hooks
from draftmill.run.ledger import Ledger
from draftmill.run.messages import Checked, TargetFacts
from draftmill.run.placement import available_memory, threads_per_process
from draftmill.run.profiling import Requests
from draftmill.run.session import Outcome, Session, in_plain_words
from draftmill.run.stalls import Stalls
from draftmill.run.supervisor import Supervisor
from draftmill.run.target_worker import TargetJob
from draftmill.run.targets import TargetGroup
from draftmill.run.telemetry import Telemetry


def run_pipeline(session: Session) -> Outcome:
    """Start the workers, see the run through, leave nothing behind."""
    config, built = session.config, session.built
    ring = None if built.placement.inline else _make_ring(session)
    matrices = None if built.placement.inline else _make_matrices(session)
    session.write_record()
    session.status.phase("loading")
    stacks.answer_in(stacks.new_file(session.folder.root / "stacks", "supervisor"))
    scene = _Scene(session)
    steps = config.train.accumulation
    try:
        with session.stop.on_signals(), in_plain_words(session.folder):
            ended = Supervisor(
                targets=_targets(session, ring, matrices),
                drafters=DrafterGroup(
                    _drafter_jobs(session, ring, matrices), session.events, session.folder.root / "stacks"
                ),
                coordinator=_coordinator(session),
                ledger=Ledger(session.folder.ledger, session.start_step * steps),
                batches_per_step=steps,
                lease_seconds=config.handoff.lease_seconds,
                hang_seconds=config.handoff.hang_seconds,
                check=config.decode_check_prompts > 0,
                asked_to_stop=session.stop,
                interrupted=lambda: session.stop.exit_code != 0,
                stalls=Stalls(session.folder.root, session.events, config.target.model, config.handoff.hang_seconds),
                hooks=scene.hooks(),
                requests=Requests(session.folder),
            ).run()
    finally:
        scene.close()
        stacks.stop_answering()
        stacks.sweep(session.folder.root / "stacks")
    return Outcome(ended.step, ended.finished)


class _Scene:
    """Telemetry and status of a run whose drafters may be started anew."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.telemetry: Telemetry | None = None
        self._fingerprint: str | None = None

    def hooks(self) -> Hooks:
        return Hooks(
            log=self._log,
            saved=self._saved,
            target_loaded=self._target_loaded,
            rewound=self._rewound,
            changed=lambda state: self.session.status.update(**state),
            checked=self._checked,
            began=self._began,
            checking=lambda: self.session.status.phase("checking"),
            say=say,
            happened=self.session.events.add,
        )

    def close(self) -> None:
        if self.telemetry is not None:
            self.telemetry.close()
            self.telemetry = None

    def _began(self) -> None:
        session = self.session
        if self.telemetry is None:
            self._open(session.start_step)
            session.begin_training()

    def _open(self, step: int) -> None:
        self.telemetry = self.session.telemetry(step)

    def _log(self, values: dict[str, Any]) -> None:
        if self.telemetry is not None:
            self.telemetry.log(values)

    def _saved(self, step: int, seconds: float) -> None:
        self.session.saved(step, seconds)
        if self.telemetry is not None:
            self.telemetry.saved(seconds)

    def _target_loaded(self, facts: TargetFacts, name: str) -> None:
        self.session.check_target(facts.fingerprint)
        if self._fingerprint not in (None, facts.fingerprint):
            raise UserError(
                f"{name} loaded other weights than the first target did (fingerprint {facts.fingerprint}, not "
                f"{self._fingerprint}); the files of target.model changed meanwhile. Put them back and start again"
            )
        self._fingerprint = facts.fingerprint

    def _rewound(self, step: int) -> None:
        self.session.events.add("rewound", f"back to the checkpoint of step {step}", step=step)
        self.close()
        self.session.folder.cut_metrics(step)
        self._open(step)

    def _checked(self, result: Checked | None) -> None:
        if result is None:
            say("warning: the decode check was left out: the run was interrupted, or the target's process ended")
        else:
            self.session.checked(result)


def _make_ring(session: Session) -> SharedRing | RingShape:
    """Slots in host memory, or the shape of those that each drafter makes in its device's memory."""
    config, built = session.config, session.built
    dtype = getattr(torch, config.target.dtype)
    shape = RingShape(built.placement.ranks, built.slots, config.data.token_budget, built.width, dtype)
    direct = reachable(built.placement.targets, built.placement.drafters)
    if config.handoff.queue == "device" and not direct:
        raise UserError(
            "handoff.queue: device, but these devices cannot write into each other's memory; use handoff.queue=host"
        )
    if config.handoff.queue == "device" or (config.handoff.queue == "auto" and direct):
        return shape
    check_room(shape, available_memory())
    return SharedRing(shape)


def _make_matrices(session: Session) -> SharedMatrices:
    spec = session.built.spec
    return SharedMatrices(spec.vocab_size, spec.hidden_size, getattr(torch, session.config.target.dtype))


def _batches(session: Session) -> tuple[int, int]:
    """First and end of the batches this command is to train."""
    steps = session.config.train.accumulation
    return session.start_step * steps, session.built.total_steps * steps


def _common(session: Session) -> dict[str, Any]:
    """What every worker's job says."""
    config, built = session.config, session.built
    return {
        "config": config,
        "spec": built.spec,
        "threads": threads_per_process(config.threads, built.placement.processes),
        "batches": _batches(session),
    }


def _coordinator(session: Session) -> Coordinator | None:
    config, built = session.config, session.built
    if built.placement.inline:
        return None
    first, end = _batches(session)
    return Coordinator(
        first=first,
        end=end,
        ranks=built.placement.ranks,
        slots=built.slots,
        batches_per_step=config.train.accumulation,
        lease_seconds=config.handoff.lease_seconds,
        whole_rounds=config.parallel == "fsdp",
    )


def _targets(
    session: Session, ring: SharedRing | RingShape | None, matrices: SharedMatrices | None
) -> TargetGroup | None:
    if matrices is None or ring is None:
        return None
    devices = session.built.placement.targets
    common = {**_common(session), "targets": len(devices), "ring": ring, "matrices": matrices}
    return TargetGroup(
        [TargetJob(name=f"target-{n}", device=device, **common) for n, device in enumerate(devices)],
        session.events,
        session.folder.root / "stacks",
    )


def _drafter_jobs(
    session: Session, ring: SharedRing | RingShape | None, matrices: SharedMatrices | None
) -> list[DrafterJob]:
    built = session.built
    common = {
        **_common(session),
        "ranks": built.placement.ranks,
        "rendezvous": session.folder.root.absolute() / "rendezvous",
        "checkpoints": session.folder.checkpoints,
        "checkpoint": session.checkpoint,
        "total_steps": built.total_steps,
        "identity": identity(session.config, built),
        "ring": ring,
        "matrices": matrices,
    }
    devices = built.placement.drafters
    return [DrafterJob(name=f"drafter-{n}", rank=n, device=device, **common) for n, device in enumerate(devices)]
