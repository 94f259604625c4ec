"""What `status` and `watch` make of the files of a run."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftmill.errors import UserError
from draftmill.run.console import noting, say
from draftmill.run.events import EventLog, tail
from draftmill.run.files import RunFolder
from draftmill.run.findings import saving_share, steady_tokens_per_second, trends, unresolved
from draftmill.run.held_back import held_back_by
from draftmill.run.status import StatusWriter, read_status, wait_for_phase
from draftmill.run.status_view import describe, headline, split_times
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


def waiting(targets: float | None, drafters: float | None, **values: Any) -> dict[str, Any]:
    return {"state": "running", "waits": {"targets_wait": targets, "drafters_wait": drafters}, **values}


def gpu(utilisation: float, *throttled: str, watts: float = 690.0) -> dict[str, Any]:
    return {"device": "cuda:3", "utilisation": utilisation, "throttled": list(throttled), "power_watts": watts}


def loaded(*devices: dict[str, Any], free: float = 1e12) -> dict[str, Any]:
    return {"load": {"devices": devices, "host": {"disk_free": free}}}


STEADY = {"phase": "training", "steady_since": 1.0}
HELD_BACK = {
    "a stall: target-1, 95 s in forward": waiting(0.0, 0.9, stalled=["target-1, 95 s in forward of batch 812"]),
    "a full disk: 0.50 GB are free, a checkpoint takes 2.10 GB": waiting(
        0.0, 0.9, checkpoint_bytes=2.1e9, **loaded(free=0.5e9)
    ),
    "cuda:3, which slows its clocks: heat; look at cooling": waiting(0.0, 0.9, **loaded(gpu(0.9, "heat"))),
    "the targets: drafters wait 38% of the time; more devices for targets would help": waiting(0.02, 0.38),
    "the drafter: targets wait 60% of the time; more drafter ranks would help": waiting(0.6, 0.0, saving_share=0.2),
    "saving: 20% of the time goes into checkpoints; a larger train.save_every would": waiting(0.1, 0, saving_share=0.2),
    "recompilation: 7 kernels were compiled in the last 10 minutes": waiting(0.0, 0.0, recompiled=7),
    "small batches: cuda:3 is busy 35% of the time": waiting(0.0, 0.0, **STEADY, **loaded(gpu(0.35))),
    "cuda:3, at its power limit (690 W)": waiting(0.0, 0.0, **STEADY, **loaded(gpu(0.99, "power limit"))),
}


@pytest.mark.parametrize("sentence", HELD_BACK)
def test_what_holds_a_run_back_is_named_with_figures_and_what_helps(sentence: str) -> None:
    found = held_back_by(HELD_BACK[sentence])
    assert found is not None
    assert found.startswith(sentence)


def test_nothing_holds_back_a_run_that_is_well_or_over() -> None:
    well = waiting(0.05, 0.09, **STEADY, **loaded(gpu(0.97)))
    unknown = loaded({"device": "cuda:0", "utilisation": None, "throttled": []})
    start_up = waiting(None, None, phase="training", steady_since=None, **loaded(gpu(0.0)))
    over = {**waiting(0.0, 0.9, stalled=["main"]), "state": "finished"}
    for status in (well, waiting(None, None, **STEADY, **unknown), start_up, over, {"state": "running"}):
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
    say("warning: trouble 0")
    with noting(events.warning):  # what was said before it is not lost
        for number in range(1, 5):
            say(f"warning: trouble {number}")
        say("no trouble")
    say("warning: of somebody else")
    others: list[str] = []
    with noting(others.append):
        assert others == ["of somebody else"]
    status.phase("failed", reason="it broke")
    found = [(event["kind"], event.get("worker"), event["text"]) for event in tail(folder.events)]
    assert found == [
        ("phase", None, "loading"), ("phase", "target-0", "loading"), ("phase", "target-0", "working"),
        *[("warning", None, f"trouble {number}") for number in range(5)], ("phase", None, "failed: it broke"),
    ]  # fmt: skip
    assert capsys.readouterr().err.splitlines() == [
        *[f"warning: trouble {number}" for number in range(5)], "no trouble", "warning: of somebody else",
    ]  # fmt: skip
    shown = [text for name, text in describe(read_status(tmp_path), time.time()) if name == "warning"]
    assert len(shown) == 1
    assert shown[0].endswith("ago, 5 times: trouble 4")  # texts that differ in numbers only are one warning


def event(kind: str, at: float, text: str = "", **details: Any) -> dict[str, Any]:
    return {"kind": kind, "time": at, "text": text, **details}


def test_a_warning_stands_until_something_resolves_it() -> None:
    stall = event("stalled", 1.0, "target-1, 95 s in forward", worker="target-1")
    other = event("stalled", 2.0, "drafter-0, 40 s", worker="drafter-0")
    events = [stall, other, event("warning", 3.0, "slow kernel"), event("phase", 4.0, "training")]
    assert [one["text"] for one in unresolved(events)] == [stall["text"], other["text"], "slow kernel"]
    events += [event("moving", 5.0, worker="target-1"), event("restart", 6.0, worker="drafter-0")]
    assert [one["text"] for one in unresolved(events)] == ["slow kernel"]
    assert [one["text"] for one in unresolved([*events, stall])] == ["slow kernel", stall["text"]]
    assert len(unresolved([event("warning", 1.0, text) for text in "abcdefgh"])) == 5


def test_saving_is_a_share_of_the_steady_time_and_not_of_its_speed() -> None:
    saves = [event("checkpoint", at, seconds=10.0) for at in (90.0, 150.0, 250.0)]
    assert saving_share(saves, 100.0, 300.0) == pytest.approx(0.1)
    assert saving_share(saves[:2], 100.0, 300.0) is None  # one is no rhythm
    assert saving_share(saves, None, 300.0) is None
    lines = [{"time": at, "context_tokens": tokens} for at, tokens in ((100.0, 1000), (200.0, 5000), (300.0, 19000))]
    assert steady_tokens_per_second(lines, saves) == pytest.approx(100.0)  # 18,000 in 200 s, less 20 s of saving
    assert steady_tokens_per_second(lines[:1], saves) is None


def entry(phase: str, **values: Any) -> dict[str, Any]:
    now = time.time()
    return {
        "phase": phase,
        "since": now,
        "pid": 7,
        "device": "cpu",
        "doing": None,
        "moved": now,
        "stalled": None,
        **values,
    }


def shown(folder: RunFolder) -> dict[str, str]:
    return dict(describe(read_status(folder.root), time.time()))


def drawn(folder: RunFolder, width: int = 80, height: int = 40) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view(read_status(folder.root), tail(folder.metrics), width, height))
    return console.export_text()


def test_case_27_a_run_that_compiles_says_so_since_when_and_what_is_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, since = RunFolder(tmp_path), time.time() - 41
    for _ in range(2):
        status = StatusWriter(folder, target="models/mine")
        status.update(workers={"drafter-0": entry("compiling", since=since - 60)})
        status.update(workers={"drafter-0": entry("working", since=since)})
    with folder.locked():
        status.phase("loading")
        status.update(workers={"drafter-0": entry("compiling", since=since, doing="2 of 3", moved=since + 20)})
        text = drawn(folder)
        assert re.search(r"drafter-0 +compiling +4[1-9] s +2 of 3, usually 1 min 00 s, no progress", text)
        line = headline(read_status(tmp_path), time.time())
        assert re.fullmatch(r"still loading, \d s, usually 1 min 00 s: drafter-0 compiling, 2 of 3", line)


def test_a_stall_stands_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.locked():
        status = StatusWriter(folder)
        status.phase("training", step=3)
        EventLog(folder.events).add("stalled", "target-1, 95 s in forward", worker="target-1")
        stalled = {"target-0": entry("working"), "target-1": entry("working", stalled="95 s in forward of batch 812")}
        status.update(workers=stalled)
        assert describe(read_status(tmp_path), time.time())[0] == ("STALLED", "target-1, 95 s in forward of batch 812")
        assert "warning" not in shown(folder)
        assert shown(folder)["held back by"].startswith("a stall: target-1, 95 s")
        assert "stalled: target-1, 95 s" in headline(read_status(tmp_path), time.time())
    assert "stalled: target-1, 95 s in forward" in shown(folder)["warning"]  # the run is dead: it never moved again


def test_start_up_and_steady_state_are_told_apart(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.locked():
        status = StatusWriter(folder, total_steps=10, slots=8, data={"rows": 61, "kept_rows": 60})
        status.phase("loading")
        time.sleep(0.6)
        status.phase("training", step=0)
        status.update(workers={"target-0": entry("working"), "drafter-0": entry("warming up")}, slots_in_use=5)
        assert read_status(tmp_path)["start_up_seconds"] is None
        assert shown(folder)["time left"] == "estimating"
        time.sleep(0.6)
        status.update(workers={"drafter-0": entry("working")}, restarts=2)
        assert 1.1 < read_status(tmp_path)["start_up_seconds"] < 10
        status.update(step=1, loss=3.0, tau=1.5, tokens_per_second=None, eta_seconds=None, skipped=1)
        assert shown(folder)["time left"] == "estimating"
        status.update(step=2, loss=3.0, tau=1.5, tokens_per_second=10.0, eta_seconds=70.0, skipped=1, logged=0.0)
        rows = shown(folder)
        assert rows["time left"] == "1 min 10 s"
        assert rows["start-up"] == "1 s until the first batch was trained"
        assert rows["queue"] == "5 of 8 slots in use"
        assert rows["dropped rows"] == "1 of 61 of the data set"
        assert (rows["restarts"], rows["skipped updates"]) == ("2", "1 (non-finite gradients)")


def test_times_add_up_and_start_up_is_not_called_steady() -> None:
    status = {"started": 1000.0, "steady_since": 1053.0}
    status["times"] = {"starting": 0.0, "loading": 41.0, "training": 100.0, "saving": 9.0, "checking": 20.0}
    assert split_times(status) == [
        ("loading", 41.0), ("first batch", 12.0), ("steady", 79.0), ("saving", 9.0), ("checking", 20.0),
    ]  # fmt: skip
    assert split_times({**status, "steady_since": None})[1] == ("first batch", 100.0)


def test_a_time_left_from_long_ago_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.locked():
        status = StatusWriter(folder, total_steps=10)
        status.phase("training", step=2, eta_seconds=70.0, logged=time.time() - 300)
        assert re.fullmatch(r"1 min 10 s, as of 5 min 0\d s ago", shown(folder)["time left"])


def a_whole_run(folder: RunFolder) -> None:
    folder.root.mkdir(exist_ok=True)
    status = StatusWriter(folder, total_steps=10, slots=8, data={"rows": 61, "kept_rows": 60})
    status.phase("loading")
    status.phase("training", step=0)
    host = {"memory_used": 2e9, "memory_total": 3e9, "own_rss": 1e9, "disk_free": 4e9}
    load = {"time": time.time(), "devices": [{"device": "cpu", "utilisation": 0.5, "throttled": []}], "host": host}
    status.update(workers={"main": entry("working", doing="batch 7")}, load=load)
    lines = [{"step": n, "loss": 4.0 - n / 10, "tau_teacher_forced": 1.0, "time": time.time()} for n in range(30)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    EventLog(folder.events).add("warning", "something slow")
    manifest = folder.checkpoints / "step-00000010" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")


def test_every_file_may_be_missing_or_cut(tmp_path: Path) -> None:
    a_whole_run(RunFolder(tmp_path / "whole"))
    names = ("status.json", "metrics.jsonl", "events.jsonl", "checkpoints/step-00000010/manifest.json", "lock")
    for alive in (False, True):
        for name in names:
            folder = RunFolder(tmp_path / f"{alive}-{name.replace('/', '-')}")
            a_whole_run(folder)
            path = folder.root / name
            whole = path.read_bytes() if path.exists() else b"12345"
            for size in {0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 2}:
                with folder.locked() if alive else contextlib.nullcontext():
                    path.write_bytes(whole[:size])
                    status = read_status(folder.root)
                    assert status["state"] == ("running" if alive else "died")
                    assert drawn(folder)
            with folder.locked() if alive else contextlib.nullcontext():
                path.unlink()
                if alive and name != "lock":
                    assert read_status(folder.root)["state"] == "running"
                elif name == "status.json":
                    with pytest.raises(UserError, match="holds no run"):
                        read_status(folder.root)
                else:
                    assert read_status(folder.root)["state"] == "died"


WRITER = """
import sys, time
from pathlib import Path
from draftmill.run.events import EventLog
from draftmill.run.files import RunFolder
from draftmill.run.status import StatusWriter
folder = RunFolder(Path(sys.argv[1]))
with folder.locked():
    status, events = StatusWriter(folder, total_steps=10), EventLog(folder.events)
    status.phase("training", step=0)
    metrics = folder.metrics.open("a")
    print("ready", flush=True)
    for n in range(1 << 30):
        worker = {"phase": "working", "since": 0.0, "pid": n, "device": "cpu", "doing": "x" * (n % 5000)}
        status.update(workers={"main": worker}, step=n, loss=1.0)
        metrics.write('{"step": 1, "loss": 1.0, "text": "' + "y" * (n % 900) + '"}\\n')
        if n % 7 == 0:
            metrics.flush()
            events.add("warning", "something " + "z" * (n % 300))
"""


def test_a_kill_at_any_moment_leaves_a_status_that_can_be_read(tmp_path: Path) -> None:
    draw = random.Random(3)
    for number in range(6):
        root = tmp_path / f"{number % 2}"  # the second half goes on in a folder that a kill has left
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        end = time.monotonic() + draw.uniform(0.0, 0.3)
        while time.monotonic() < end:
            assert read_status(root)["state"] == "running"
        process.kill()
        process.communicate()
        status = read_status(root)
        assert (status["state"], status["phase"]) == ("died", "training")
        assert "died while training" in dict(describe(status, time.time()))["state"]
        assert all(isinstance(row, dict) for row in tail(RunFolder(root).metrics))


def test_a_session_that_has_not_written_yet_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.locked():
        StatusWriter(folder, total_steps=10).phase("failed", reason="it broke", step=7)
    stored = json.loads(folder.status.read_text())
    folder.status.write_text(json.dumps({**stored, "pid": stored["pid"] + 1}))
    assert read_status(tmp_path)["state"] == "failed"
    with folder.locked():
        status = read_status(tmp_path)
        assert (status["state"], status["phase"], status.get("reason")) == ("running", "starting", None)


def test_asking_for_the_status_never_keeps_a_run_from_starting(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.locked():
        assert folder.is_locked()
    assert not folder.is_locked()
    asks = (tmp_path / "lock").open()
    fcntl.flock(asks, fcntl.LOCK_SH)  # as `is_locked` does for a moment
    timer = threading.Timer(0.2, asks.close)
    timer.start()
    with folder.locked():
        assert asks.closed
    with folder.locked(), pytest.raises(UserError, match="in use by a run that is still going"), folder.locked():
        pass


def test_threads_may_write_the_status_at_once(tmp_path: Path) -> None:
    status = StatusWriter(RunFolder(tmp_path))
    errors: list[BaseException] = []

    def write(name: str) -> None:
        try:
            for n in range(100):
                status.update(**{name: n})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(f"key{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    written = json.loads((tmp_path / "status.json").read_text())
    assert [written[f"key{number}"] for number in range(4)] == [99] * 4


def test_waiting_for_a_phase_ends_with_the_phase_or_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    timer = threading.Timer(0.5, lambda: StatusWriter(folder).phase("failed"))
    timer.start()
    assert wait_for_phase(tmp_path, "training")["state"] == "failed"
    assert capsys.readouterr().err == f"no run in {tmp_path} yet; waiting for one (Ctrl-C ends this)\n"
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
    with pytest.raises(UserError, match=r"no such phase; phases are starting, loading, compiling"):
        wait_for_phase(tmp_path, "trainning")


def test_a_curve_is_drawn_between_its_ends() -> None:
    assert sparkline([0.0, 7.0], 10) == "▁█"
    assert sparkline([float(n) for n in range(800)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0] * 5, 3) == "▁▁▁"
    assert len(sparkline([float(n % 7) for n in range(1003)], 60)) == 60


def test_the_view_fits_the_terminal(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    a_whole_run(folder)
    with folder.locked():
        workers = {f"target-{n}": entry("working", doing=f"batch {n}") for n in range(6)}
        StatusWriter(folder, total_steps=10).update(phase="training", workers=workers, step=3)
        text = drawn(folder, height=50)
        assert "3 of 10" in text
        assert "    loss      1.1 …        4  █" in text
        assert text.count("batch ") == 6
        for height in (10, 4):
            lines = drawn(folder, height=height).splitlines()
            assert len(lines) <= height
            assert any("target-0 … target-5 working, batch 0" in line for line in lines)
        assert all(len(line) <= 80 for line in text.splitlines())
