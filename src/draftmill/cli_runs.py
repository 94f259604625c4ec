"""The commands that look at runs: they read files, and only `profile` asks a run for something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def status(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
    wait: Annotated[
        str | None, typer.Option("--wait", metavar="PHASE", help="First wait until the run is in this phase, or ends.")
    ] = None,
) -> None:
    """Where a run is: phase, step, loss, τ, speed, time left. Works on live, finished and dead runs, from files alone.

    Exit code 0: running or finished, 3: stopped, 4: failed or died.
    """
    import time

    from rich.console import Console

    from draftmill.run.status import EXIT_CODES, read_status, wait_for_phase
    from draftmill.run.status_view import table

    values = read_status(run) if wait is None else wait_for_phase(run, wait)
    if as_json:
        print(json.dumps(values))
    else:
        Console().print(table(values, time.time()))
    raise typer.Exit(EXIT_CODES[values["state"]])


def watch(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """The status of a run, live, with its curves. Ctrl-C leaves the run alone.

    Ends when the run ends, with the exit code of `status`.
    """
    from draftmill.run.watch import watch as live

    raise typer.Exit(live(run))


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; several are put side by side.")],
    output: Annotated[
        Path | None,
        typer.Option(help="Page to write. Default: report.html in the run's folder; for several, in the current one."),
    ] = None,
) -> None:
    """Write one HTML page of a run, or of several side by side: curves, acceptance by slot, evaluation, time, config.

    Works on live, finished and dead runs, from files alone. The page needs no network and no other file.
    """
    from draftmill.run.report import report as write

    print(f"wrote {write(runs, output)}")


def profile(
    run: Annotated[Path, typer.Argument(help="Folder of a run that is going on.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps of a drafter, and batches of a target.")] = 5,
) -> None:
    """What the steps of a live run are spent on: kernels by family, idle time, copies, the longest kernels.

    Writes traces for ui.perfetto.dev into RUN/profiles. The run goes on, more slowly meanwhile, and trains the same.
    Exit code 1: a trace is missing.
    """
    from rich.console import Console

    from draftmill.run.profile import profile as record

    raise typer.Exit(record(run, steps, Console()))


COMMANDS = (status, watch, profile, report)
