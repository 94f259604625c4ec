"""`draftmill profile`: asks a live run to record a few steps, waits for the traces, and says what is in them."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from draftmill.errors import UserError
from draftmill.run.files import write_atomically
from draftmill.run.profile_table import rendered
from draftmill.run.profile_trace import read_trace, summarise
from draftmill.run.profiling import FOLDER, REQUEST, WORKERS
from draftmill.run.status import read_status
from draftmill.run.words import duration

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 600.0


def profile(root: Path, steps: int, console: Console) -> int:
    """Print what `steps` optimizer steps of a drafter and as many batches of a target are spent on; the traces stay in
    RUN/profiles. Returns the exit code: 1 where a trace is missing. UserError where the run is not running, or does not
    come to it."""
    if steps < 1:
        raise UserError(f"--steps {steps}: at least one is needed")
    folder = _ask(root, steps)
    results = _await(root, folder, steps, lambda text: console.print(escape(text)))
    summaries = {}
    for result in results:
        if result["error"] is None:
            summaries[result["worker"]] = _show(folder, result, console)
        else:
            console.print(escape(f"\n{result['worker']}: no trace, {result['error']}"))
    write_atomically(folder / "summary.json", json.dumps({"workers": results, "summaries": summaries}, indent=1))
    console.print(escape(f"\ntraces in {folder}: open them in https://ui.perfetto.dev or chrome://tracing"))
    return 1 if any(result["error"] is not None for result in results) else 0


def _ask(root: Path, steps: int) -> Path:
    """Write the request; returns the folder of its results."""
    status = read_status(root)
    if status["state"] != "running":
        raise UserError(f"{root} is not running ({status['state']}), and only a live run can be profiled")
    request = root / REQUEST
    if request.exists():
        raise UserError(f"{root} has a request for a profile already; wait for it, or remove {request}")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = next(name for n in range(1, 1 << 30) if not (root / FOLDER / (name := f"{stamp}-{n}")).exists())
    try:
        (root / FOLDER / name).mkdir(parents=True)
        write_atomically(request, json.dumps({"name": name, "steps": steps}))
    except OSError as error:
        raise UserError(f"{root} cannot be written ({error.strerror}), and that is where a run is asked") from error
    return root / FOLDER / name


def _await(root: Path, folder: Path, steps: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """What each worker answered, or why it will not. UserError if nothing comes of it."""
    ends, told, request = time.monotonic() + PATIENCE_SECONDS, "", root / REQUEST
    try:
        while True:
            status, workers = read_status(root), _read(folder / WORKERS)
            results = {} if workers is None else {name: _result(folder, name, status, workers) for name in workers}
            done = [result for result in results.values() if result is not None]
            if workers and len(done) == len(workers):
                return done
            if workers is None and status["state"] != "running":
                raise UserError(f"{root} ended ({status['state']}) before it could be profiled")
            waiting = [name for name, result in results.items() if result is None]
            if time.monotonic() > ends:
                raise UserError(_in_vain(root, status, waiting))
            if (text := _news(status, waiting, steps)) != told:
                told = text
                say(text)
            time.sleep(POLL_SECONDS)
    finally:
        request.unlink(missing_ok=True)  # a no-op unless nobody took it


def _result(folder: Path, name: str, status: dict[str, Any], workers: dict[str, int]) -> dict[str, Any] | None:
    """A worker's own account, or in its place why there will be none; None while it is at it."""
    found = _read(folder / f"{name}.result.json")
    if found is not None:
        return found
    now = status.get("workers", {}).get(name)
    if status["state"] != "running":
        why = f"the run ended ({status['state']}) before it was done"
    elif now is not None and now["pid"] != workers[name]:
        why = "its process ended before it was done, and another one has its place"
    else:
        return None
    return {"worker": name, "trace": None, "error": why}


def _news(status: dict[str, Any], waiting: list[str], steps: int) -> str:
    if waiting:
        return f"{' and '.join(waiting)}: recording {steps} steps or batches …"
    if status["phase"] == "training":
        return "asked; the run looks once a second …"
    return f"the run is {status['phase']}; it is profiled once it trains …"


def _in_vain(root: Path, status: dict[str, Any], waiting: list[str]) -> str:
    """Which worker does what."""
    now = time.time()
    doing = [
        f"{name} is {worker['phase']} since {duration(now - worker['since'])}"
        for name, worker in status.get("workers", {}).items()
        if name in waiting or not waiting
    ]
    for_whom = f"{' and '.join(waiting)} of {root}" if waiting else str(root)
    words = [
        f"{for_whom} did not record anything within {duration(PATIENCE_SECONDS)}",
        f"the run is {status['phase']} since {duration(now - status['since'])}",
        *doing,
        f"`draftmill status {root}` says more",
    ]
    return "; ".join(words) + ("; what is recorded later comes into its folder profiles" if waiting else "")


def _show(folder: Path, result: dict[str, Any], console: Console) -> dict[str, Any] | None:
    """Pack the trace and print what is in it."""
    trace = folder / str(result["trace"])
    packed = trace.with_name(f"{trace.name}.gz")
    with trace.open("rb") as raw, gzip.open(packed, "wb", compresslevel=4) as file:
        shutil.copyfileobj(raw, file)
    trace.unlink()
    result["trace"] = packed.name
    try:
        summary = summarise(read_trace(packed))
    except ValueError as error:
        result["error"] = str(error)
        console.print(escape(f"\n{result['worker']}: {error}"))
        return None
    for part in rendered(result, summary):
        console.print(part)
    return summary.to_dict()


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(FileNotFoundError):
        values: dict[str, Any] = json.loads(path.read_text())
        return values
    return None
