"""What people see of `train` itself: on a terminal, and in a log file."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftmill.run import live
from draftmill.run.console import say
from draftmill.run.files import RunFolder
from draftmill.run.live import Now, in_log
from draftmill.run.status import StatusWriter

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(command: list[str], columns: int = 80, **environment: str) -> tuple[int, str]:
    """Runs a command with a terminal for stdout and stderr: its exit code, and all that it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", **environment}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # its end
        while part := os.read(ours, 1 << 16):
            seen += part
    os.close(ours)
    return process.wait(timeout=60), seen.decode()


def lines_of(seen: str) -> list[str]:
    return [line.rstrip() for line in re.split(r"[\r\n]+", ANSI.sub("", seen))]


SCRIPT = """
import subprocess, sys, time
from pathlib import Path
from draftmill.run import live
from draftmill.run.console import is_live, say
from draftmill.run.files import RunFolder
from draftmill.run.status import StatusWriter
live.FRAME_SECONDS = 0.1
folder = RunFolder(Path(sys.argv[1]))
with folder.locked():
    status = StatusWriter(folder)
    with live.shown(folder, status):
        assert is_live()
        status.phase("loading")
        say("warning: said by the run")
        print("run_dir: printed on stdout")
        bar = "b'50%|##  |\\\\r100%|####|\\\\n'"
        code = f"import os; os.write(2, {bar}); os.write(2, b'from a child\\\\n'); os.write(1, b'on its stdout\\\\n')"
        subprocess.run([sys.executable, "-c", code])
        time.sleep(1.5)
        say("said later")
        code = "import os; os.write(2, b'last words')"
        subprocess.run([sys.executable, "-c", code])
    assert not is_live()
    say("after the view")
    if len(sys.argv) > 2:
        raise SystemExit("it broke")
"""


def test_on_a_terminal_every_line_stands_above_the_live_view(tmp_path: Path) -> None:
    code, seen = on_a_terminal([sys.executable, "-c", SCRIPT, str(tmp_path)])
    assert code == 0, seen
    lines = lines_of(seen)
    said = ("warning: said by the run", "run_dir: printed on stdout", "100%|####|", "from a child", "on its stdout",
            "said later")  # fmt: skip
    assert [line for line in lines if line in said] == list(said)
    assert any(line.startswith(" state") and "running: starting" in line for line in lines)
    assert any(line.startswith(" state") and "running: loading" in line for line in lines)
    assert [lines.count(line) for line in ("last words", "after the view")] == [0, 1]  # half a line is kept in the file
    assert (tmp_path / "stderr.log").read_text().endswith("last words")


def test_the_reason_of_a_failure_is_read_below_the_view(tmp_path: Path) -> None:
    code, seen = on_a_terminal([sys.executable, "-c", SCRIPT, str(tmp_path), "fails"])
    assert (code, lines_of(seen).count("it broke")) == (1, 1)
    assert seen.count("\x1b[?25h") == 1  # the cursor is shown again


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    plain = SCRIPT.replace("assert is_live()", "assert not is_live()")
    code, seen = on_a_terminal([sys.executable, "-c", plain, str(tmp_path)], TERM="dumb")
    assert code == 0, seen
    assert "\x1b" not in seen
    assert not (tmp_path / "stderr.log").exists()


def test_case_27_a_log_file_says_what_goes_on_when_nothing_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "SILENCE_SECONDS", 0.5)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(40_000_000_000)
    folder = RunFolder(tmp_path)
    status = StatusWriter(folder, target=str(tmp_path))
    worker = {"phase": "loading", "since": time.time() - 31, "pid": 7, "device": "cpu", "doing": "43% of 40.0 GB"}
    status.phase("loading")
    status.update(workers={f"target-{n}": worker for n in range(3)})
    with in_log(Now(folder, status)):
        for _ in range(15):
            say("something else")
            time.sleep(0.1)
        busy = capsys.readouterr().err
        time.sleep(1.8)
    assert set(busy.splitlines()) == {"something else"}
    quiet = capsys.readouterr().err.splitlines()
    assert 1 <= len(quiet) <= 4
    wanted = r"still loading, \d s, about 40 s for 40.0 GB at 1 GB/s: target-0 … target-2 loading, 43% of 40.0 GB"
    assert re.fullmatch(wanted, quiet[0]), quiet


@dataclass
class Logged:
    """A run and its resumption, into log files."""

    folder: Path
    texts: list[str]
    etas: list[float | None]  # of status.json, during the second one
    status: dict[str, Any]


@pytest.fixture(scope="module")
def logged(tiny_target: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Logged:
    folder = tmp_path_factory.mktemp("logged")
    config = {
        "run_dir": str(folder / "run"), "threads": 1, "decode_check_prompts": 0,
        "data": {"prepared": str(prepared), "token_budget": 192}, "target": {"model": str(tiny_target)},
        "drafter": {"layers": 1, "block_size": 4},
        "train": {"epochs": 100, "max_steps": 8, "anchors": 24, "log_every": 2, "save_every": 4, "lr": 0.003},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    texts: list[str] = []
    etas: list[float | None] = []
    command = [sys.executable, "-m", "draftmill", "train", str(folder / "config.yaml")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)}
    for more in ([], ["--resume", "train.max_steps=24"]):
        with (folder / "log").open("w+") as log:
            process = subprocess.Popen([*command, *more], stdout=log, stderr=log, env=env)
            while process.poll() is None:
                if more and (folder / "run" / "status.json").exists():
                    status = json.loads((folder / "run" / "status.json").read_text())
                    if status["pid"] == process.pid:
                        etas.append(status.get("eta_seconds"))
                time.sleep(0.02)
            log.seek(0)
            texts.append(log.read())
            assert process.returncode == 0, texts[-1]
    return Logged(folder / "run", texts, etas, status)


@pytest.mark.slow
def test_case_28_time_left_is_never_negative_and_not_known_right_after_resume(logged: Logged) -> None:
    lines = [line for line in logged.texts[1].splitlines() if line.startswith("step ")]
    assert lines[0].startswith("step 10/24 ")
    assert lines[0].endswith("left estimating")
    assert logged.etas[0] is None
    known = [eta for eta in logged.etas if eta is not None]
    assert known
    assert min(known) >= 0
    started = logged.status["started"]
    rows = [json.loads(line) for line in (logged.folder / "metrics.jsonl").read_text().splitlines()]
    new = [row for row in rows if row["time"] > started]
    assert max(known) <= 3 * (new[-1]["time"] - started) + 1  # nothing of the session before is in it
    assert new[0]["tokens_per_second"] is None


@pytest.mark.slow
def test_case_29_a_log_file_holds_the_config_and_plain_sparse_lines(logged: Logged) -> None:
    text = logged.texts[0]
    assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f]", text) == []
    head, _, rest = text.partition("mask token:")
    assert yaml.safe_load(head)["train"]["max_steps"] == 8
    assert "%|" not in rest
    steps = [line for line in rest.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["2/8", "4/8", "6/8", "8/8"]
    assert len(rest.splitlines()) < 20
    assert not (logged.folder / "stderr.log").exists()


@pytest.mark.slow
def test_the_end_of_a_run_sums_it_up(logged: Logged) -> None:
    last = logged.texts[1].splitlines()[-4:]
    assert re.match(r"time: .*steady \d+ s", last[0])
    assert re.fullmatch(r"steady: [\d,]+ context tokens/s, τ \d\.\d\d \(teacher-forced\)", last[1])
    assert last[2].startswith("finished: drafter at ")
    assert last[3].startswith("next: draftmill evaluate ")
    assert set(logged.status["times"]) >= {"loading", "training", "saving"}


@pytest.mark.slow
def test_train_on_a_terminal_shows_where_it_is_from_the_start(logged: Logged) -> None:
    command = ["train", str(logged.folder.parent / "config.yaml"), f"run_dir={logged.folder.parent / 'seen'}"]
    code, seen = on_a_terminal([sys.executable, "-m", "draftmill", *command])
    assert code == 0, seen
    lines = lines_of(seen)
    states = [line.split("running: ")[1].split()[0] for line in lines if "running: " in line]
    assert states[0] == "starting"
    assert "max_steps: 8" in [line.strip() for line in lines]
    assert sum(line.startswith("finished: drafter at") for line in lines) == 1
    assert not any(line.startswith("step 2/8") or "%|" in line for line in lines)  # the view shows them, not lines
    assert all(len(line) <= 80 for line in lines)
