"""Plain lines on stderr."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """One plain line on stderr: what is going on now."""
    print(text, file=sys.stderr, flush=True)
