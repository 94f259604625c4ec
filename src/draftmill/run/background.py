"""Something done again and again beside a process's own work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(name: str, seconds: float, do: Callable[[], None]) -> Iterator[None]:
    """A thread calls `do` every so many seconds, first after the first of them, while this lasts. It is over when this
    returns: a call that goes on is waited for."""
    ended = threading.Event()

    def go_on() -> None:
        while not ended.wait(seconds):
            do()

    thread = threading.Thread(target=go_on, daemon=True, name=name)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
