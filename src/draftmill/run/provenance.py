"""What made a run: versions, machine, commit."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """Plain values for run.json and checkpoints."""
    return {
        "versions": {name: _version(name) for name in ("draftmill", "torch", "transformers", "safetensors", "numpy")},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "git_commit": _git_commit(),
        "command": sys.argv,
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _git_commit() -> str | None:
    """Commit of the source this package runs from, marked when the tree has changes; None outside a checkout."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
