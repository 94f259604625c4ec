"""Lines on stderr. On a terminal they stand above the live view, elsewhere they are all there is.

A worker's lines go to the process that began it, so that one process writes them all and notes the warnings.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WARNING = "warning: "

_last = time.monotonic()
_live = False
_warnings: deque[str] = deque(maxlen=20)  # said while nobody noted them
_note: Callable[[str], None] | None = None
_relay: Callable[[str], None] | None = None


def say(text: str) -> None:
    """One plain line on stderr: what is going on now. One that begins with "warning: " is noted, see `noting`."""
    global _last
    _last = time.monotonic()
    if _relay is not None:
        return _relay(text)
    if text.startswith(WARNING):
        (_note or _warnings.append)(text.removeprefix(WARNING))
    with contextlib.suppress(OSError):  # a terminal that is gone, or a log on a full disk, is no reason to end
        print(text, file=sys.stderr, flush=True)


def silent_seconds() -> float:
    """Since this process last said something."""
    return time.monotonic() - _last


@contextmanager
def noting(note: Callable[[str], None]) -> Iterator[None]:
    """While this lasts, `note` is told each warning without its first word, and at once those that were said before."""
    global _note
    _note = note
    while _warnings:
        note(_warnings.popleft())
    try:
        yield
    finally:
        _note = None


def relay(send: Callable[[str], None]) -> None:
    """From now on, lines of this process are given to `send` instead."""
    global _relay
    _relay = send


def is_live() -> bool:
    """Whether a live view shows how training goes, so that no line needs to."""
    return _live


def set_live(live: bool) -> None:
    global _live
    _live = live
