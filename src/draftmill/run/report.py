"""`draftmill report`: one HTML page of a run, or of several side by side, and pictures, made from their files alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from draftmill.errors import UserError
from draftmill.run.report_files import read_run
from draftmill.run.report_page import page
from draftmill.run.report_png import write_pictures


def report(roots: Sequence[Path], output: Path | None) -> Path:
    """Write the page, and its charts as pictures beside it, and return the page's path. Left out, output is report.html
    in the run's folder, or for several runs in the current one. UserError for a folder without a run, a run given
    twice, and a place that cannot be written."""
    now = time.time()
    if len({root.resolve() for root in roots}) < len(roots):
        raise UserError("a run is given twice; give each once")
    try:
        runs = [read_run(root, label, now) for root, label in zip(roots, labels(roots), strict=True)]
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}); see to its permissions") from error
    path = output or (roots[0] / "report.html" if len(roots) == 1 else Path("report.html"))
    text = page(runs).encode("utf-8", errors="replace")  # a file may hold half a surrogate pair
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.write_bytes(text)
        temporary.replace(path)
        write_pictures(runs, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); name another file with --output") from error
    return path


def labels(roots: Sequence[Path]) -> list[str]:
    """The folder's name, or the path as given where that is not enough to tell them apart."""
    names = [root.resolve().name for root in roots]
    return names if len(set(names)) == len(names) else [str(root) for root in roots]
