"""Copies a run to wandb, in a process of its own: `python -m draftmill.run.wandb_copy JOB`, ended by the end of stdin.

It reads metrics.jsonl as that grows. What has been sent is noted in the run's folder, so a resumed run goes on in the
same run of wandb and a line is sent once; a line that was made again, behind a checkpoint, is another one.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from draftmill.run.events import tail
from draftmill.run.files import RunFolder, write_atomically
from draftmill.run.telemetry import scalars
from draftmill.run.tracking import kill_descendants

POLL_SECONDS = 1.0
REACH_SECONDS = 5.0  # for the server to answer at all
INIT_SECONDS = 20.0  # for it to take the run
ONLINE, OFFLINE = "online", "offline"
ENVIRONMENT = dict(os.environ)  # before wandb adds to it


@dataclass(frozen=True, slots=True)
class Job:
    """root: of the run. pid: its process. seconds: to send what is left once the run has ended. project, entity, name:
    of wandb; None where the environment or wandb decides. offline: why nothing is to be sent, if that is known."""

    root: str
    pid: int
    seconds: float
    project: str
    entity: str | None
    name: str | None
    offline: str | None = None


@dataclass(slots=True)
class Sent:
    """How many lines of metrics.jsonl were given to wandb in one of its modes, and the last one's step and time."""

    lines: int = 0
    step: int = 0
    time: float = 0.0

    def holds(self, row: dict[str, Any]) -> bool:
        return bool(row["step"] <= self.step and row["time"] <= self.time)

    def note(self, row: dict[str, Any]) -> None:
        self.lines, self.step, self.time = self.lines + 1, row["step"], row["time"]


@dataclass(slots=True)
class Memory:
    """What the next session must know: the id of wandb's run, and what it has by mode. In wandb.json."""

    id: str
    sent: dict[str, Sent] = field(default_factory=lambda: {ONLINE: Sent(), OFFLINE: Sent()})

    @classmethod
    def read(cls, path: Path) -> Memory:
        if not path.exists():
            return cls(os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8])
        values = json.loads(path.read_text())
        return cls(values["id"], {mode: Sent(**sent) for mode, sent in values["sent"].items()})

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)))

    def before(self, mode: str) -> Sent:
        """Where to go on: online has what was sent online; a run kept on disk goes on behind all that there is."""
        return replace(self.sent[ONLINE] if mode == ONLINE else max(self.sent.values(), key=lambda sent: sent.time))


class Lines:
    """New complete lines of metrics.jsonl, which is appended to and, at a return to a checkpoint, replaced."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._place = path, 0, 0

    def read(self) -> list[dict[str, Any]]:
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            about = os.fstat(file.fileno())
            if about.st_ino != self._inode or about.st_size < self._place:
                self._inode, self._place = about.st_ino, 0
            file.seek(self._place)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class Copy:
    """One session of the run, copied to one session of wandb."""

    def __init__(self, job: Job, ended: threading.Event) -> None:
        self.job, self.ended = job, ended
        self.folder = RunFolder(Path(job.root))
        self.path = self.folder.root / "wandb.json"
        self.run: Any = None
        self._memory: Memory | None = None
        self._sent_before = Sent()  # this session began

    def go(self) -> None:
        mode = self._mode()
        if mode is None or not self._await_training():
            return
        memory = self._memory = Memory.read(self.path)
        sent = memory.sent[mode] = memory.before(mode)
        self._sent_before = replace(sent)
        self._begin(memory.id, mode)
        memory.write(self.path)
        lines = Lines(self.folder.metrics)
        over = False
        while not over:
            over = self.ended.wait(POLL_SECONDS)  # asked before reading: then nothing is written behind what is read
            new = [row for row in lines.read() if not sent.holds(row)]
            for row in new:
                # wandb's own step must rise, also where ours goes back; online it knows itself where it was
                own_step = sent.lines if mode == OFFLINE else None
                self.run.log({"step": row["step"], **scalars(row)}, step=own_step)
                sent.note(row)
            if new:
                memory.write(self.path)
        self._finish()

    def _finish(self) -> None:
        import wandb

        self.run.finish(exit_code=0 if self._status().get("phase") in ("finished", "stopped") else 1)
        wandb.teardown()  # waits for the process that writes the file: finish alone leaves it the last lines to write

    def give_up(self) -> None:
        """The time after the run's end is over. wandb writes its file every 15 seconds, so the last lines would be lost
        with it: what this session was to send is kept on disk instead."""
        late = f"was not done {self.job.seconds:g} s after the run's end, so what it shows is not complete"
        if self.job.offline is None and self._memory is not None:
            self._memory.sent[ONLINE] = self._sent_before
            self._memory.write(self.path)
            _offline_anew(self.job, late)
        with suppress(OSError):  # the run may be gone altogether
            print(f"warning: wandb {late}; metrics.jsonl is", flush=True)
        _leave()

    def _status(self) -> dict[str, Any]:
        try:
            values = json.loads(self.folder.status.read_text())
        except FileNotFoundError:
            return {}
        return dict(values) if values.get("pid") == self.job.pid else {}  # else of an earlier session

    def trains(self) -> bool:
        """Whether this session has begun to train. Before that its folder holds the files of an earlier one."""
        status, newest = self._status(), tail(self.folder.metrics)[-1:]
        if status.get("phase") in ("training", "checking"):
            return True
        return bool(newest) and newest[0]["time"] >= status.get("started", math.inf)

    def _await_training(self) -> bool:
        """A run that never trains has no business with wandb."""
        while not self.trains():
            if self.ended.wait(POLL_SECONDS):
                return self.trains()
        return True

    def _mode(self) -> str | None:
        """Online where the server answers, else on disk. None: the user wants neither."""
        import wandb

        settings = wandb.setup().settings
        if settings.mode == "disabled":
            print("wandb: nothing is sent or kept, as WANDB_MODE is disabled", flush=True)
            return None
        if settings.mode == OFFLINE or self.job.offline is not None:
            return OFFLINE
        if why := _out_of_reach(str(settings.base_url)):
            _offline_anew(self.job, f"{why}, so the run is not shown there")
        return ONLINE

    def _begin(self, id: str, mode: str) -> None:
        """Where the server refuses the run, this process begins again, on disk."""
        import wandb

        online = mode == ONLINE
        try:
            self.run = wandb.init(
                project=self.job.project,
                entity=self.job.entity,
                name=self.job.name or os.environ.get("WANDB_NAME") or self.folder.root.name,
                id=id,
                resume="allow" if online else None,
                mode="online" if online else "offline",
                dir=os.environ.get("WANDB_DIR") or self.job.root,
                config=self._config(),
                allow_val_change=True,
                settings=wandb.Settings(
                    console="off", silent=True, init_timeout=INIT_SECONDS, x_stats_pid=self.job.pid
                ),
            )
        except wandb.Error as error:
            if not online:
                raise
            _offline_anew(self.job, f"refused the run ({' '.join(str(error).split())}), so it is not shown there")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        with suppress(OSError):
            print(self._said(online), flush=True)

    def _config(self) -> dict[str, Any]:
        """The resolved config, and what run.json says of versions, machine and data."""
        config = yaml.safe_load(self.folder.config.read_text())
        return {**config, "run": json.loads(self.folder.provenance.read_text())}

    def _said(self, online: bool) -> str:
        if online:
            return f"wandb: {self.run.url}"
        directory = self.run.settings.sync_dir
        if self.job.offline is None:
            return f"wandb: kept on disk, as WANDB_MODE is offline; upload it with: wandb sync {directory}"
        return f"warning: wandb {self.job.offline}. It is kept on disk; upload it later with: wandb sync {directory}"


def _out_of_reach(server: str) -> str | None:
    """Why, or None if it answers, whatever the answer is."""
    import requests

    try:
        requests.get(server, timeout=REACH_SECONDS, stream=True).close()
    except requests.Timeout:
        return f"does not answer within {REACH_SECONDS:g} s ({server})"
    except requests.RequestException as error:
        return f"cannot be reached ({server}, {type(error).__name__})"
    return None


def _offline_anew(job: Job, why: str) -> None:
    """wandb does not let go of a run that it has tried to begin, so this process begins from its own beginning."""
    kill_descendants(os.getpid())
    again = json.dumps({**asdict(job), "offline": why})
    os.execve(sys.executable, [sys.executable, "-m", "draftmill.run.wandb_copy", again], ENVIRONMENT)


def _watch(copy: Copy) -> None:
    """Note the end of the run, and bound what comes after it: sending may wait for a network for ever."""
    sys.stdin.buffer.read()
    copy.ended.set()
    if not copy.trains():
        _leave()
    time.sleep(copy.job.seconds)
    copy.give_up()


def _leave() -> None:
    """At once: what wandb still wants to tell its maker may wait for a network."""
    kill_descendants(os.getpid())
    os._exit(0)


def main() -> None:
    copy = Copy(Job(**json.loads(sys.argv[1])), threading.Event())
    threading.Thread(target=_watch, args=(copy,), daemon=True).start()
    copy.go()
    _leave()


if __name__ == "__main__":
    main()
