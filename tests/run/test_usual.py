"""What is usual on a machine: remembered from run to run, whatever happens to the file."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from draftmill.run import usual as memory
from draftmill.run.files import RunFolder
from draftmill.run.status import StatusWriter
from draftmill.run.usual import Kind, by_rule, record, usual

LOADING = Kind("loading", "target", "models/mine", "NVIDIA H200")


def test_usual_is_the_median_of_the_newest_five_of_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "durations.jsonl"
    assert usual(LOADING, path) is None
    for seconds in (500.0, 900.0, 41.0, 39.0, 40.0, 300.0, 38.0):
        record(LOADING, seconds, path)
    assert usual(LOADING, path) == 40.0
    others = (replace(LOADING, phase="compiling"), replace(LOADING, role="main"), replace(LOADING, device="cpu"))
    assert [usual(other, path) for other in others] == [None] * 3


def test_cut_and_foreign_lines_are_passed_over_and_harm_no_other(tmp_path: Path) -> None:
    path = tmp_path / "durations.jsonl"
    record(LOADING, 10.0, path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'null\n[1]\n{"phase": "loading"}\n\xff\xfe\n' + whole[:30])  # the last was cut
    record(LOADING, 12.0, path)
    assert usual(LOADING, path) == 11.0
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        record(LOADING, 5.0, path)
        assert usual(LOADING, path) == 5.0


def test_the_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "durations.jsonl"
    monkeypatch.setattr(memory, "MOST_BYTES", 5000)
    monkeypatch.setattr(memory, "KEPT_LINES", 10)
    for seconds in range(200):
        record(LOADING, float(seconds), path)
        assert path.stat().st_size < 5300
    assert usual(LOADING, path) == 197.0


def test_where_it_cannot_be_kept_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").write_text("")
    path = tmp_path / "a file" / "durations.jsonl"
    record(LOADING, 1.0, path)
    assert usual(LOADING, path) is None
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    record(LOADING, 1.0)
    assert usual(LOADING) is None


MANY = """
import sys
from pathlib import Path
from draftmill.run.usual import Kind, record
for n in range(200):
    record(Kind("saving", sys.argv[2], "m", "cpu"), float(n), Path(sys.argv[1]))
"""


def test_runs_side_by_side_do_not_tear_lines(tmp_path: Path) -> None:
    path = tmp_path / "durations.jsonl"
    processes = [subprocess.Popen([sys.executable, "-c", MANY, str(path), f"run {number}"]) for number in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["role"] for row in rows} == {"run 0", "run 1", "run 2"}
    assert all(set(row) == {"phase", "role", "target", "device", "seconds", "time"} for row in rows)


def test_a_rule_stands_in_where_nothing_was_measured(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(54_000_000_000)
    assert by_rule("loading", "target", str(tmp_path)) == (54.0, "54.0 GB at 1 GB/s")
    assert by_rule("loading", "drafter", str(tmp_path)) is None
    assert by_rule("compiling", "target", str(tmp_path)) is None
    assert by_rule("loading", "target", "org/a-model-of-the-hub") is None


def test_a_run_remembers_phases_that_came_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    status = StatusWriter(RunFolder(tmp_path), target="models/mine", devices="cpu")

    def says(phase: str, since: float, pid: int = 7) -> None:
        status.update(workers={"target-0": {"phase": phase, "since": since, "pid": pid, "device": "cpu"}})

    says("loading", 100.0)
    says("working", 140.0)  # loading took 40 s
    says("loading", 200.0, pid=8)  # it was started anew
    says("starting", 203.0, pid=9)  # it died while loading: no measure
    says("loading", 210.0, pid=9)
    worker = json.loads((tmp_path / "status.json").read_text())["workers"]["target-0"]
    assert (worker["usual_seconds"], worker["usual_from"]) == (40.0, "earlier runs")
    rows = [json.loads(line) for line in (tmp_path / "draftmill" / "durations.jsonl").read_text().splitlines()]
    assert [(row["phase"], row["role"], row["seconds"]) for row in rows] == [
        ("loading", "target", 40.0), ("starting", "target", 7.0),
    ]  # fmt: skip
    assert memory.default_path() == tmp_path / "draftmill" / "durations.jsonl"
