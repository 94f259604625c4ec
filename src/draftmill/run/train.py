"""`draftmill train`: settles what the run is, picks how it runs on these devices, and sees it through."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from draftmill.config import RunConfig
from draftmill.run.alone import run_alone
from draftmill.run.build import Built, announce, build, identity
from draftmill.run.console import noting, say
from draftmill.run.doctor_start import heed
from draftmill.run.events import EventLog
from draftmill.run.files import RunFolder
from draftmill.run.live import shown
from draftmill.run.load import load_shown
from draftmill.run.pipeline import run_pipeline
from draftmill.run.resume import check_same_run, starting_point
from draftmill.run.session import Session
from draftmill.run.status import StatusWriter
from draftmill.run.stop import StopRequest
from draftmill.run.tracking import tracked


def train(config: RunConfig, *, resume: bool, trial: bool = False) -> int:
    """Run to the end of the schedule or to a request to stop. Returns the exit code. trial: what comes of it is thrown
    away, so nothing is said of what to do with it."""
    folder = RunFolder(config.run_dir)
    _draw_no_bars()
    events = EventLog(folder.events)
    with folder.locked(), noting(events.warning), tracked(config.tracking, folder):
        began = time.time()
        checkpoint = starting_point(folder, config, resume=resume)
        built = build(config)
        if checkpoint is not None:
            check_same_run(checkpoint, built.spec, identity(config, built))
        status = StatusWriter(folder, target=config.target.model, started=began, **_facts(built))
        heed(config, built, say)
        limit = config.train.max_minutes
        stop = StopRequest(None if limit is None else 60 * limit)
        session = Session(config, folder, built, status, events, checkpoint, stop, trial)
        devices = [*built.placement.targets, *built.placement.drafters]
        with shown(folder, status), load_shown(folder.root, devices, status), _ends_noted(status):
            announce(config, built)
            outcome = run_alone(session) if built.placement.alone else run_pipeline(session)
            return session.conclude(outcome)


@contextmanager
def _ends_noted(status: StatusWriter) -> Iterator[None]:
    """A run that ends early says why in its status, if the disk takes it."""
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            status.phase("stopped", reason=f"interrupted while {status.current}")
        raise
    except BaseException as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        with contextlib.suppress(OSError):
            status.phase("failed", reason=reason)
        raise


def _facts(built: Built) -> dict[str, Any]:
    """What the status says of the run from its start."""
    info = built.prepared.info
    slots = None if built.placement.inline else built.slots * built.placement.ranks
    data = {"rows": info.rows, "kept_rows": info.kept_rows, "dropped": info.dropped}
    return {"devices": built.placement.describe(), "slots": slots, "data": data}


def _draw_no_bars() -> None:
    """Progress bars of libraries would tear the live view, and fill a log file. Here, and in the workers."""
    from transformers.utils import logging

    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    logging.disable_progress_bar()
