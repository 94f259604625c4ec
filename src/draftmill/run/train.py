"""`draftmill train`: settles what the run is, picks how it runs on these devices, and sees it through."""

from __future__ import annotations

from draftmill.config import RunConfig
from draftmill.run.alone import run_alone
from draftmill.run.build import announce, build, identity
from draftmill.run.events import EventLog
from draftmill.run.files import RunFolder
from draftmill.run.pipeline import run_pipeline
from draftmill.run.resume import check_same_run, starting_point
from draftmill.run.session import Session
from draftmill.run.status import StatusWriter
from draftmill.run.stop import StopRequest


def train(config: RunConfig, *, resume: bool) -> int:
    """Run to the end of the schedule or to a request to stop. Returns the exit code."""
    folder = RunFolder(config.run_dir)
    with folder.locked():
        checkpoint = starting_point(folder, config, resume=resume)
        built = build(config)
        if checkpoint is not None:
            check_same_run(checkpoint, built.spec, identity(config, built))
        status = StatusWriter(folder)
        limit = config.train.max_minutes
        stop = StopRequest(None if limit is None else 60 * limit)
        session = Session(config, folder, built, status, EventLog(folder.events), checkpoint, stop)
        try:
            announce(config, built)
            outcome = run_alone(session) if built.placement.alone else run_pipeline(session)
            return session.conclude(outcome)
        except KeyboardInterrupt:
            status.phase("stopped", reason=f"interrupted while {status.current}")
            raise
        except BaseException as error:
            status.phase("failed", reason=str(error).splitlines()[0] if str(error) else type(error).__name__)
            raise
