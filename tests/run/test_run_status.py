"""What `status` and `watch` make of the files of a run."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from draftmill.errors import UserError
from draftmill.run.events import EventLog, tail
from draftmill.run.files import RunFolder
from draftmill.run.status import StatusWriter, describe, held_back_by, read_status, trends, wait_for_phase
from draftmill.run.watch import sparkline, view


def rows(values: list[float]) -> list[dict[str, Any]]:
    return [{"loss": value, "tau_teacher_forced": 3.0} for value in values]


@pytest.mark.parametrize(("slope", "wanted"), [(-0.05, "falling"), (0.05, "rising"), (0.0, "flat")])
def test_a_trend_is_told_from_noise(slope: float, wanted: str) -> None:
    draw = random.Random(7)
    noisy = [5 + slope * n + draw.gauss(0, 0.2) for n in range(80)]
    assert trends(rows(noisy))["loss"] == wanted
    assert trends(rows(noisy))["tau_teacher_forced"] == "flat"


def test_few_lines_or_skipped_updates_have_no_trend() -> None:
    assert trends(rows([1.0] * 7)) == {}
    assert trends([{"loss": None, "tau_teacher_forced": None}] * 50) == {}


def waiting(targets: float | None, drafters: float | None, state: str = "running") -> dict[str, Any]:
    return {"state": state, "waits": {"targets_wait": targets, "drafters_wait": drafters}}


def test_the_side_that_is_waited_for_is_named_with_what_helps() -> None:
    sentence = held_back_by(waiting(0.02, 0.38))
    assert sentence is not None
    assert sentence.startswith("the targets: drafters wait 38% of the time; more devices for targets")
    sentence = held_back_by(waiting(0.6, 0.0))
    assert sentence is not None
    assert sentence.startswith("the drafter: targets wait 60%")
    for status in (waiting(0.05, 0.09), waiting(None, None), waiting(0.0, 0.9, "finished"), {"state": "running"}):
        assert held_back_by(status) is None


def test_the_end_of_a_file_is_read_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert tail(path) == []
    lines = [json.dumps({"n": n, "text": "é" * 10}, ensure_ascii=False) + "\n" for n in range(100)]
    path.write_text("".join(lines) + '{"n": 100, "te')
    assert [row["n"] for row in tail(path)] == list(range(100))
    for size in range(200, 240):  # wherever the cut falls, also within a letter
        found = [row["n"] for row in tail(path, size)]
        assert found == list(range(100 - len(found), 100))
        assert 3 <= len(found) <= 6


def test_warnings_and_phases_are_events_and_the_newest_warnings_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    status, events = StatusWriter(folder, total_steps=10), EventLog(folder.events)
    status.phase("loading")
    status.update(workers={"target-0": {"phase": "loading", "pid": 7, "since": 0.0}})
    status.update(workers={"target-0": {"phase": "loading", "pid": 7, "since": 0.0}})
    status.update(workers={"target-0": {"phase": "working", "pid": 7, "since": 0.0}})
    for number in range(5):
        events.say(f"warning: trouble {number}")
    events.say("no trouble")
    status.phase("failed", reason="it broke")
    found = [(event["kind"], event.get("worker"), event["text"]) for event in tail(folder.events)]
    assert found == [
        ("phase", None, "loading"), ("phase", "target-0", "loading"), ("phase", "target-0", "working"),
        *[("warning", None, f"trouble {number}") for number in range(5)], ("phase", None, "failed: it broke"),
    ]  # fmt: skip
    assert capsys.readouterr().err.splitlines()[-1] == "no trouble"
    shown = [text for name, text in describe(read_status(tmp_path), time.time()) if name == "warning"]
    assert [text.split(": ")[1] for text in shown] == ["trouble 2", "trouble 3", "trouble 4"]


def test_waiting_for_a_phase_ends_with_the_phase_or_with_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.locked():
        status = StatusWriter(folder)
        status.phase("loading")
        timer = threading.Timer(0.5, lambda: status.phase("training"))
        timer.start()
        started = time.monotonic()
        assert wait_for_phase(tmp_path, "training")["phase"] == "training"
        assert 0.4 < time.monotonic() - started < 10
        timer = threading.Timer(0.3, lambda: status.phase("failed", reason="x"))
        timer.start()
        assert wait_for_phase(tmp_path, "checking")["state"] == "failed"
    with pytest.raises(UserError, match=r"no such phase; phases are loading, compiling, training"):
        wait_for_phase(tmp_path, "trainning")


def test_a_curve_is_drawn_between_its_ends() -> None:
    assert sparkline([0.0, 7.0], 10) == "▁█"
    assert sparkline([float(n) for n in range(800)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0] * 5, 3) == "▁▁▁"
    assert len(sparkline([float(n % 7) for n in range(1003)], 60)) == 60


def test_the_view_holds_table_and_curves(tmp_path: Path) -> None:
    from rich.console import Console

    folder = RunFolder(tmp_path)
    StatusWriter(folder, total_steps=10).phase("training", step=3)
    console = Console(width=100, record=True, file=(tmp_path / "out").open("w"))
    console.print(view(read_status(tmp_path), rows([4.0, 3.0, 1.5, 1.0]), 100))
    text = console.export_text()
    assert "3 of 10" in text
    assert "loss          1 …          4  █" in text
