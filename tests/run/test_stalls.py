"""What workers say they do, and what is made of those that get no further."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_helpers import wait_for
from stalling import Stalling, StallingJob

from draftmill.run import activity as activity_module
from draftmill.run import stacks
from draftmill.run.activity import Activity
from draftmill.run.compiles import Compiles
from draftmill.run.events import EventLog, tail
from draftmill.run.launch_local import Worker
from draftmill.run.messages import Beat
from draftmill.run.oversight import as_status
from draftmill.run.stalls import Observed, Stalls, awaited, hangs, limit_seconds

HERE = Path(__file__).parent
WORKING = Beat("working", 90.0, "forward", "batch 812", 0.1, 0.1, 0.4, 0.5, 1.0, 90.0)


def events(root: Path, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in tail(root / "events.jsonl") if event["kind"] in kinds]


# --- what a worker says of itself


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(activity_module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_rare_phases_are_told_at_once_and_passing_ones_only_when_they_last(clock: Clock) -> None:
    told: list[str] = []
    own: Activity
    own = Activity("micro-step", lambda: told.append(own.beat().phase))
    own.enter("loading", "43 % of 54.0 GB")
    clock.now += 40
    beat = own.beat()
    assert (beat.phase, beat.what, beat.in_phase, beat.still) == ("loading", "43 % of 54.0 GB", 40, 40)
    own.further("44 % of 54.0 GB")
    beat = own.beat()
    assert (beat.what, beat.in_phase, beat.still) == ("44 % of 54.0 GB", 40, 0), "it moves, in the same phase"
    own.enter("micro-step", "batch 0")
    assert own.beat().phase == "warming up"
    for number in range(1, 4):
        clock.now += 0.5
        own.enter("waiting for a batch", f"batch {number}")
        clock.now += 0.5
        own.enter("micro-step", f"batch {number}")
    assert own.beat().phase == "working"
    own.enter("waiting for a batch", "batch 4")
    clock.now += 1.9
    assert own.beat().phase == "working"
    assert own.beat().still is None, "it has nothing to do"
    clock.now += 0.2
    beat = own.beat()
    assert (beat.phase, beat.in_phase) == ("waiting for a batch", pytest.approx(2.1))
    own.enter("saving", "step 500")
    own.enter("micro-step", "batch 4")
    assert told == ["loading", "warming up", "working", "saving", "working"]


def test_time_waited_counts_from_the_first_batch_on(clock: Clock) -> None:
    own = Activity("forward", lambda: None)
    own.enter("waiting for a slot")
    clock.now += 100
    assert (own.beat().waited, own.beat().steady) == (0.0, 0.0)
    for _ in range(3):
        own.enter("forward", "batch")
        clock.now += 3
        own.enter("waiting for a slot")
        clock.now += 1
    assert (own.beat().waited, own.beat().steady) == (3.0, 12.0), "the wait that goes on counts too"
    assert own.beat().moved == 1.0


def test_what_is_usual_comes_from_its_own_kind_without_the_first(clock: Clock) -> None:
    own = Activity("forward", lambda: None)
    for seconds in (60.0, 1.0, 2.0, 9.0, 2.0):
        own.enter("forward", "batch")
        clock.now += seconds
        own.enter("saving", "step 5")
        clock.now += 30
    own.enter("forward", "batch 6")
    assert (own.beat().usual, own.beat().longest) == (2.0, 9.0)
    own.enter("saving", "step 10")
    assert own.beat().usual == 30


# --- when it is too long


@pytest.mark.parametrize(
    ("changes", "earlier", "hang_seconds", "seconds"),
    [
        ({}, None, 1800.0, 20.0),  # the floor
        ({"usual": 4.0, "longest": 5.0}, None, 1800.0, 40.0),  # ten times the usual
        ({"usual": 4.0, "longest": 30.0}, None, 1800.0, 90.0),  # three times the longest
        ({"usual": 400.0}, None, 1800.0, 900.0),  # half of what a worker is given
        ({"usual": 400.0}, None, None, 4000.0),
        ({"phase": "loading", "usual": None, "longest": 0.0}, None, 10.0, 120.0),  # nobody is ended while loading
        ({"phase": "loading", "usual": None, "longest": 0.0}, 300.0, 10.0, 900.0),
        ({"phase": "saving", "usual": 2.0}, None, 1800.0, 60.0),
    ],
)
def test_the_limit(changes: dict[str, Any], earlier: float | None, hang_seconds: float | None, seconds: float) -> None:
    assert limit_seconds(replace(WORKING, **changes), earlier, hang_seconds) == seconds


def rank(number: int, activity: str, still: float, silent: float = 0.0) -> Observed:
    phase = activity if activity in ("all-reduce", "saving") else "working"
    beat = replace(WORKING, phase=phase, activity=activity, what=None, still=still)
    return Observed(f"drafter-{number}", os.getpid(), "cpu", beat, silent, answers=False, stacks=Path())


def test_who_waits_in_an_all_reduce_is_not_the_one_that_hangs() -> None:
    waiting, saving = rank(0, "all-reduce", 900.0), rank(1, "saving", 890.0)
    assert awaited(waiting, [waiting, saving]) == [saving]
    assert not hangs(waiting, [waiting, saving], 600.0)
    assert hangs(saving, [waiting, saving], 600.0)
    both = [rank(0, "all-reduce", 900.0), rank(1, "all-reduce", 890.0)]
    assert [hangs(one, both, 600.0) for one in both] == [True, True], "what connects them hangs"
    silent = [rank(0, "all-reduce", 900.0), rank(1, "all-reduce", 890.0, silent=10.0)]
    assert awaited(silent[0], silent) == [silent[1]], "it spoke last before it was stopped"


# --- what is said of real processes


@pytest.fixture
def started(tmp_path: Path) -> Iterator[dict[str, Worker]]:
    """One that sleeps, one that computes, one that holds its interpreter, one that waits and one that goes on again."""
    names = {f"target-{n}": how for n, how in enumerate(("asleep", "busy", "held", "waiting", "back"))}
    workers = {
        how: Worker(name, Stalling, StallingJob(how), tmp_path / "stacks")  # type: ignore[arg-type]
        for name, how in names.items()
    }
    yield workers
    for worker in workers.values():
        worker.kill()
        worker.close()


@pytest.mark.slow
def test_stalled_processes_are_told_apart_with_their_stacks(tmp_path: Path, started: dict[str, Worker]) -> None:
    stalls = Stalls(tmp_path, EventLog(tmp_path / "events.jsonl"), "models/x", hang_seconds=6.0)
    workers = list(started.values())

    def look() -> list[Observed]:
        for worker in workers:
            worker.messages()
        all_ = [worker.observed(time.monotonic()) for worker in workers]
        stalls.look(all_)
        return all_

    def of(kind: str, how: str) -> list[dict[str, Any]]:
        return [event for event in events(tmp_path, kind) if event["worker"] == started[how].name]

    def looked_until(kind: str, *hows: str) -> bool:
        look()
        time.sleep(0.1)
        return all(of(kind, how) for how in hows)

    wait_for(lambda: looked_until("stalled", "asleep", "busy", "held", "back"), 60)
    (asleep,), (busy,), (held,) = (of("stalled", how) for how in ("asleep", "busy", "held"))
    assert asleep["text"].startswith("target-0, ")
    assert " s in forward of batch 812 (usual 0.01" in asleep["text"]
    assert "asleep, it uses no CPU" in asleep["text"]
    assert (asleep["phase"], asleep["doing"]) == ("working", "batch 812")
    assert 3 <= asleep["seconds"] < 30
    assert "it computes" in busy["text"]
    assert "asleep, it uses no CPU; its signs of life do not come, so C code holds the interpreter" in held["text"]
    assert "signs of life" not in asleep["text"] + busy["text"]
    wait_for(lambda: looked_until("moving", "back"), 60)
    assert 5 < of("moving", "back")[0]["seconds"] < 30
    pid = started["waiting"].process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: looked_until("stalled", "waiting"), 60)
    assert f"stopped by a signal; `kill -CONT {pid}` continues it" in of("stalled", "waiting")[0]["text"]
    all_ = look()
    shown = {one.name: as_status(one, stalls, all_) for one in all_}
    assert "stopped by a signal" in shown["target-3"]["stalled"]
    assert shown["target-4"]["stalled"] is None
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: looked_until("moving", "waiting"), 60)

    def written(how: str, function: str) -> bool:
        return function in (tmp_path / of("stalled", how)[0]["stacks"]).read_text()

    for how, function in (("asleep", "sleep_for_good"), ("busy", "compute_for_good"), ("held", "hold_the_interpreter")):
        wait_for(lambda how=how, function=function: written(how, function), 30)  # type: ignore[misc]
        text = (tmp_path / of("stalled", how)[0]["stacks"]).read_text()
        assert "in _beat" in text, "all threads are there"
        assert text.count("stalled: ") == 1
    stacks.sweep(tmp_path / "stacks")
    assert (tmp_path / "stacks" / "target-2-0.txt").exists()


HELD = """
import ctypes, sys, time
from pathlib import Path
from draftmill.run import watchdog
from draftmill.run.events import EventLog
from draftmill.run.files import RunFolder
from draftmill.run.status import StatusWriter
watchdog.SILENT_SECONDS = 2.0
root = Path(sys.argv[1])
folder = RunFolder(root)
status = StatusWriter(folder)
status.phase("training")
def held_here():
    ctypes.PyDLL(None).sleep(6)  # holds the interpreter
with watchdog.Watchdog(root, "models/x", "cpu", status, EventLog(folder.events)) as activity:
    for batch in range(3):
        activity.enter("micro-step", f"batch {batch}")
        time.sleep(0.01)
    held_here()
    activity.enter("micro-step", "batch 4")
    time.sleep(2.5)
"""


@pytest.mark.slow
def test_the_run_in_one_process_keeps_its_stacks_while_its_interpreter_is_held(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HELD, str(tmp_path)])
    try:
        path = tmp_path / "stacks" / "main-0.txt"
        wait_for(lambda: path.exists() and "held_here" in path.read_text(), 60)
        assert process.poll() is None
        assert not events(tmp_path, "stalled"), "nothing of the process can run just now"
        assert process.wait(60) == 0
    finally:
        process.kill()
    stalled, moving = events(tmp_path, "stalled", "moving")
    assert "C code held the interpreter" in stalled["text"]
    assert (stalled["worker"], moving["worker"]) == ("main", "main")
    status = json.loads((tmp_path / "status.json").read_text())["workers"]["main"]
    assert (status["phase"], status["doing"], status["stalled"]) == ("working", "batch 4", None)


# --- loading and compiling


def test_loading_is_told_by_share_and_size(tiny_target: Path) -> None:
    from draftmill.target.config import TargetConfig
    from draftmill.target.model import load_causal_lm
    from draftmill.target.progress import weights_placed

    told: list[str] = []
    with weights_placed(str(tiny_target), told.append):
        load_causal_lm(TargetConfig(model=str(tiny_target)), device="cpu")
    assert len(told) > 6 * 9
    assert told[-1] == "100 % of 0.0 GB"
    assert told == sorted(told, key=lambda text: int(text.split()[0]))


KERNELS = """
import json, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from draftmill.run.activity import Activity
from draftmill.run.compiles import Compiles, listen

@triton.jit
def add(x, n, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(x + place, tl.load(x + place, mask=place < n) + 1, mask=place < n)

def compile(block, hints):
    kinds = {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    triton.compile(ASTSource(add, kinds, {"BLOCK": block}, hints), target=GPUTarget("cuda", 90, 32))

told = []
own = Activity("forward", lambda: None)
listen(Compiles(own, told.append))
own.enter("compiling")
compile(16, {})
compile(16, {})
warming = own.beat()
own.enter("forward", "batch 0")
own.enter("forward", "batch 1")
compile(32, {(1,): [["tt.divisibility", 16]]})
print(json.dumps([warming.phase, warming.what, *told]))
"""


def test_triton_tells_what_it_compiles_and_why_once_more(tmp_path: Path) -> None:
    """By the real compiler, which needs no GPU."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "kernels.py")], capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    phase, what, told = json.loads(done.stdout)
    assert (phase, what) == ("compiling", "2 kernels, 1 of them from the cache")
    assert told.startswith("kernel add after the first batch, in ")
    assert "BLOCK is = 32, was = 16" in told
    assert "tt.divisibility" in told


def test_what_compiles_again_and_again_does_not_fill_the_record() -> None:
    told: list[str] = []
    own = Activity("forward", lambda: None)
    compiles = Compiles(own, told.append)
    for batch in range(200):
        own.enter("forward", f"batch {batch}")
        source = SimpleNamespace(name="add", signature={"n": "i32"}, constants={(0,): batch}, attrs={})
        compiles(src=source, metadata={}, metadata_group={}, times=SimpleNamespace(total=1e6), cache_hit=False)
    assert len(told) == 50
    assert told[-1].endswith("n is = 50, was = 49; further ones are not told")
