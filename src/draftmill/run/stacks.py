"""What every thread of a process is doing, written to RUN/stacks on demand: also of one that hangs in C code.

A process that may be asked opens its file at its start and leaves the writing to a signal handler that needs neither
memory nor the interpreter (faulthandler). Where py-spy is installed, it adds the C frames.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

SIGNAL = signal.SIGUSR1  # a user may send it too: kill -USR1 PID
PY_SPY_SECONDS = 30.0


def new_file(folder: Path, name: str) -> Path:
    """The file for the next process of this name: NAME-0.txt, NAME-1.txt, …"""
    return next(path for n in range(1 << 30) if not (path := folder / f"{name}-{n}.txt").exists())


def answer_in(path: Path) -> None:
    """From now on `SIGNAL` has this process write its stacks to the end of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(SIGNAL, file=path.open("a"), all_threads=True)


def stop_answering() -> None:
    faulthandler.unregister(SIGNAL)


def ask(pid: int, path: Path, heading: str, *, answers: bool) -> None:
    """Have the process write its stacks below a heading, and py-spy too. Does not wait for either.

    answers: whether the process has called `answer_in`; the signal would kill it otherwise.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"\n=== {time.strftime('%Y-%m-%d %H:%M:%S')} {heading}\n{_by_the_kernel(pid)}\n")
    if is_stopped(pid):
        return  # it would answer only when it goes on, and tell of another moment
    if answers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
    if (program := _py_spy()) is not None:
        threading.Thread(target=_spy, args=(program, pid, path), daemon=True, name="py-spy").start()


def is_stopped(pid: int) -> bool:
    """Whether a signal (or a debugger) holds the process."""
    return state_of(pid) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def state_of(pid: int) -> str:
    """psutil's word: running, sleeping, disk-sleep, stopped, …; "gone" for none."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def sweep(folder: Path) -> None:
    """Remove the files of processes that were never asked."""
    for path in folder.glob("*.txt"):
        if path.stat().st_size == 0:
            path.unlink()
    with contextlib.suppress(OSError):  # not empty, or never made
        folder.rmdir()


def _by_the_kernel(pid: int) -> str:
    """State, memory and what each thread sleeps in, as the kernel says: all there is of a stopped process."""
    lines = [f"process {pid}: {state_of(pid)}"]
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            state = (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
            name, place = ((task / part).read_text().strip() for part in ("comm", "wchan"))
            lines.append(f"  thread {task.name} {name}: state {state}, in {'user code' if place == '0' else place}")
    return "\n".join(lines)


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _spy(program: str, pid: int, path: Path) -> None:
    try:
        done = subprocess.run(
            [program, "dump", "--native", "--pid", str(pid)], capture_output=True, text=True, timeout=PY_SPY_SECONDS
        )
        text = done.stdout or f"not possible: {done.stderr.strip()}"
    except (OSError, subprocess.TimeoutExpired) as error:
        text = f"not possible: {error}"
    with contextlib.suppress(OSError), path.open("a") as file:
        file.write(f"\n--- py-spy, C frames included\n{text}\n")
