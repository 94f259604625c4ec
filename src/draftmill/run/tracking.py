"""Who else is told how a run goes: wandb and Prometheus, each served by a process of its own beside the run.

Those processes read the run's files and nothing else, and nothing waits for them. So they may hang, crash or be killed
for want of a network, and training does not notice; metrics.jsonl is complete whatever happens to them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import psutil

from draftmill.config import TrackingConfig, WandbConfig
from draftmill.errors import UserError
from draftmill.run.console import say
from draftmill.run.files import RunFolder

FINISH_SECONDS = 10.0  # for wandb to send what is left, and as long again to keep on disk what could not be sent
OVERTIME_SECONDS = 3.0  # it keeps to that itself; then it is killed
QUIET_SECONDS = 1.0  # a wait that is longer is explained


@contextmanager
def tracked(config: TrackingConfig, folder: RunFolder) -> Iterator[None]:
    """Tells others how the run in `folder` goes, for as long as this lasts. UserError, before anything is begun, for a
    package that is not installed or a port that is taken."""
    if config.wandb.project is not None:
        _require("wandb", "tracking.wandb.project")
    if config.prometheus_port is not None:
        _require("prometheus_client", "tracking.prometheus_port", extra="prometheus")
    with ExitStack() as both:
        if config.prometheus_port is not None:
            both.enter_context(_served(config.prometheus_host, config.prometheus_port, folder))
        if config.wandb.project is not None:
            both.enter_context(_copied(config.wandb, folder))
        yield


def _require(module: str, key: str, extra: str | None = None) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(
            f"{key} needs a package that is not installed: pip install 'draftmill[{extra or module}]', or leave it out"
        )


@contextmanager
def _served(host: str, port: int, folder: RunFolder) -> Iterator[None]:
    """The port is taken here, so that one in use is known at once, and given to the process that answers."""
    try:
        listener = listening_socket(host, port)
    except OSError as error:
        where = f"tracking.prometheus_port: {host}:{port}"
        raise UserError(f"{where} cannot be used ({error.strerror}); choose another, or leave it out") from error
    with (
        listener,
        _beside("prometheus", "prometheus", folder, [str(folder.root), str(listener.fileno())], (listener.fileno(),)),
    ):
        listener.close()
        say(f"prometheus: http://{host}:{port}/metrics")
        yield


def listening_socket(host: str, port: int) -> socket.socket:
    """OSError where the host has no such address, or the port is taken."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family)


@contextmanager
def _copied(config: WandbConfig, folder: RunFolder) -> Iterator[None]:
    job = {"root": str(folder.root.absolute()), "pid": os.getpid(), "seconds": FINISH_SECONDS, **config.model_dump()}
    with _beside("wandb", "wandb_copy", folder, [json.dumps(job)]):
        yield


@contextmanager
def _beside(
    name: str, module: str, folder: RunFolder, arguments: Sequence[str], handles: Sequence[int] = ()
) -> Iterator[None]:
    """A process that runs a module of ours until its stdin ends, which the end of this process brings about too. Each
    line that it prints is said as the run's own; what else it writes goes to NAME.log in the run's folder."""
    log = folder.root / f"{name}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", f"draftmill.run.{module}", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, pass_fds=tuple(handles),
            process_group=0,  # Ctrl-C is for the run; this one ends after it
        )  # fmt: skip

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip())
        if code := process.wait():
            say(
                f"warning: {name}: the process that tells it of the run ended with code {code}, so what it shows is "
                f"not complete; the run and its own record are as they should be. {log} has the reason"
            )

    listener = threading.Thread(target=listen, name=name, daemon=True)
    listener.start()
    try:
        yield
    finally:
        _end(process, name)
        listener.join(OVERTIME_SECONDS)


def _end(process: subprocess.Popen[str], name: str) -> None:
    """By the end of its stdin; by force where it takes too long, or a second Ctrl-C breaks into the wait."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(QUIET_SECONDS)
        if process.poll() is None:
            say(f"{name}: sending what is left, for at most {FINISH_SECONDS:.0f} s")
            with suppress(subprocess.TimeoutExpired):
                process.wait(2 * FINISH_SECONDS + OVERTIME_SECONDS)
    finally:
        kill_descendants(process.pid)
        process.kill()
        process.wait()


def kill_descendants(pid: int) -> None:
    """What a process has started and not ended."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
