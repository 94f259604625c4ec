"""Processes of a run are killed, stopped, interrupted and fed with what breaks them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from mill import BATCHES_PER_STEP, SHARED, STEPS, Mill, Run, assert_each_batch_once, assert_same, split
from run_helpers import metrics, wait_for
from safetensors.torch import load_file, save_file

from draftmill.data.config import PrepareConfig
from draftmill.data.plan import BatchPlan
from draftmill.data.prepare import prepare
from draftmill.data.prepared import DOCUMENTS_FILE, PreparedSet
from draftmill.run.events import tail
from draftmill.run.status import read_status
from draftmill.train.checkpoint import find_latest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mill(tiny_target: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mill]:
    before = set(SHARED.iterdir())
    with Mill.opened(tmp_path_factory.mktemp("faults"), tiny_target, prepared) as mill:
        yield mill
    wait_for(lambda: set(SHARED.iterdir()) <= before, 30)


@pytest.fixture(scope="module")
def undisturbed(mill: Mill) -> Run:
    return mill.train("undisturbed")


def ledger(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def suspended(*processes: psutil.Process) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def saved_step(run: Run) -> int:
    latest, _ = find_latest(run.folder / "checkpoints")
    return 0 if latest is None else latest.step


# --- killed


@pytest.mark.long
def test_a_killed_target_and_then_a_killed_drafter_change_nothing(mill: Mill, undisturbed: Run) -> None:
    run = mill.start("killed", *split(1, 1))
    run.await_rows(4)
    run.worker("target-0").kill()
    run.await_said(r"target-0 ended \(killed by SIGKILL .*; its batches go to others, it starts anew in 1 s")
    run.await_rows(12)
    run.worker("drafter-0").kill()
    run.await_said(r"the drafter ended \(drafter-0: killed by SIGKILL .* it goes on from step (10|15|20)")
    assert run.end() == 0, run.said
    assert_same(run, undisturbed)
    assert run.status()["restarts"] == 2
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    own = [event["text"] for event in events if event["kind"] == "phase" and "worker" not in event]
    assert own == ["loading", "training", "finished"]
    of_target = [event for event in events if event["kind"] == "phase" and event.get("worker") == "target-0"]
    assert len({event["pid"] for event in of_target}) == 2, "it was started anew"
    assert {"loading", "warming up"} <= {event["text"] for event in of_target}
    restarts = [(event["worker"], event["reason"]) for event in events if event["kind"] == "restart"]
    assert [worker for worker, _ in restarts] == ["target-0", "drafter-0"]
    assert all("killed by SIGKILL" in reason for _, reason in restarts)
    assert not (run.folder / "stacks").exists(), "nobody was asked for its stacks"
    told = [event["text"] for event in events if event["kind"] in ("warning", "rewound")]
    assert any("target-0 ended (killed by SIGKILL" in text for text in told)
    assert any(re.match(r"back to the checkpoint of step (10|15|20)$", text) for text in told)
    assert [event["step"] for event in events if event["kind"] == "checkpoint"][-1] == STEPS


def test_a_killed_and_a_silent_target_and_a_killed_rank_change_nothing(mill: Mill, undisturbed: Run) -> None:
    run = mill.start("killed-of-two", *split(2, 2), "handoff.lease_seconds=2")
    run.await_rows(3)
    run.worker("target-1").kill()
    run.await_rows(5)
    run.worker("target-0").suspend()
    run.await_said(r"target-0 has been silent for \d+ s \(last phase: (working|waiting for a slot)\) and is killed")
    run.await_rows(8)
    run.worker("drafter-1").kill()
    run.await_said(r"it goes on from step (5|10|15|20)")
    assert run.end() == 0, run.said
    assert_same(run, undisturbed)
    assert run.status()["restarts"] == 3


def test_everything_ends_with_a_killed_supervisor_and_goes_on(mill: Mill, undisturbed: Run) -> None:
    run = mill.start("orphaned", *split(2, 2))
    run.await_rows(7)
    run.worker("target-1").suspend()
    run.process.kill()
    wait_for(lambda: not run.processes(), 10)
    assert run.process.wait() == -signal.SIGKILL
    resumed = mill.train("orphaned", *split(1, 1), "--resume")
    assert "resuming from" in resumed.said
    assert_same(resumed, undisturbed)


# --- silent


def test_a_late_result_is_dropped(mill: Mill, undisturbed: Run) -> None:
    run = mill.start("late", *split(2, 1), "handoff.lease_seconds=20", "handoff.slots=64")  # never full
    run.await_that(lambda: run.phase("target-0") == "working" and run.phase("target-1") not in (None, "starting"))
    with suspended(run.worker("target-0")):  # the other is soon there: a busy machine takes long to start a process
        run.await_said(r"target-0 has been silent for 20 s; batch \d+ goes to another target")
        run.await_rows(1)
    assert run.end() == 0, run.said
    assert_same(run, undisturbed)
    assert run.status()["restarts"] == 0
    late = int(re.findall(r"target-0 has been silent for 20 s; batch (\d+) goes", run.said)[0])
    assert [entry["target"] for entry in ledger(run) if entry.get("trained") == late] == ["target-1"]
    assert metrics(run.folder)[-1]["waits"]["slots_in_use"] == 0  # the slot was blocked until the late result came


# --- stalled, starved


ENDLESS = ("train.max_steps=1000000", "train.epochs=1000000", "train.save_every=1000000")


def said_of(run: Run, kind: str, worker: str) -> list[dict[str, Any]]:
    return [
        event for event in tail(run.folder / "events.jsonl") if (event["kind"], event.get("worker")) == (kind, worker)
    ]


def entry(run: Run, worker: str) -> dict[str, Any]:
    return dict(run.status()["workers"][worker])


def assert_interrupted_in_time(run: Run) -> None:
    """Within 30 seconds, with a checkpoint, and each batch up to it trained once."""
    run.interrupt()
    assert run.end(30) == 130, run.said
    step = saved_step(run)
    assert step == run.status()["step"]
    assert step > 0
    assert_each_batch_once(run, step * BATCHES_PER_STEP)


@contextlib.contextmanager
def slowed(*processes: psutil.Process) -> Iterator[None]:
    """They get a fifth of the time."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            with suspended(*processes):
                time.sleep(0.8)
            time.sleep(0.2)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_who_is_stopped_starved_or_slow_is_named(mill: Mill) -> None:
    run = mill.start("named", *split(2, 2), *ENDLESS, "handoff.lease_seconds=600")
    run.await_rows(20)
    names = ("target-0", "target-1", "drafter-0", "drafter-1")
    processes = {name: run.worker(name) for name in names}
    run.await_that(lambda: all(entry(run, name)["phase"] in ("working", "waiting for a slot") for name in names))

    def stalled(name: str) -> str | None:
        found: str | None = entry(run, name)["stalled"]
        return found

    # a stopped target
    with suspended(processes["target-1"]):
        run.await_that(lambda: stalled("target-1") is not None)
        assert f"stopped by a signal; `kill -CONT {processes['target-1'].pid}` continues it" in str(stalled("target-1"))
        assert stalled("target-0") is None
        (event,) = said_of(run, "stalled", "target-1")
        stacks = (run.folder / event["stacks"]).read_text()
        assert "state T" in stacks, "all that can be known of it"
    run.await_that(lambda: bool(said_of(run, "moving", "target-1")))
    run.await_that(lambda: stalled("target-1") is None)

    # a stopped rank: the other one hangs in the all-reduce, and the targets have nowhere to put their states
    with suspended(processes["drafter-1"]):
        run.await_that(lambda: stalled("drafter-1") is not None)
        assert "drafter-0 waits for it in all-reduce" in str(stalled("drafter-1"))
        run.await_that(lambda: entry(run, "drafter-0")["phase"] == "all-reduce")
        run.await_that(lambda: entry(run, "target-0")["phase"] == "waiting for a slot")
        assert entry(run, "drafter-0")["doing"] == "waits for drafter-1"
        assert stalled("drafter-0") is None
        assert stalled("target-0") is None
        assert "drafter-1" in str(read_status(run.folder)["held_back_by"])
        before = run.status()["updated"]
        run.await_that(lambda: run.status()["updated"] > before + 1)  # the file is right also while nothing happens
    run.await_that(lambda: stalled("drafter-1") is None)

    # no target: the drafters wait and say for what
    with suspended(processes["target-0"], processes["target-1"]):
        run.await_that(lambda: entry(run, "drafter-0")["phase"] == "waiting for a batch")
        assert entry(run, "drafter-0")["doing"].startswith("batch ")
        run.await_that(lambda: stalled("target-0") is not None and stalled("target-1") is not None)
        assert stalled("drafter-0") is None
    run.await_that(lambda: stalled("target-0") is None and stalled("target-1") is None)

    # slow ones: the other side waits
    with slowed(processes["target-0"], processes["target-1"]):
        run.await_that(lambda: str(read_status(run.folder)["held_back_by"]).startswith("the targets: drafters wait"))
    with slowed(processes["drafter-0"], processes["drafter-1"]):
        run.await_that(lambda: str(read_status(run.folder)["held_back_by"]).startswith("the drafter: targets wait"))
    assert_interrupted_in_time(run)
    assert run.status()["restarts"] == 0


def test_a_run_in_one_process_says_what_it_does_and_ends_in_time(mill: Mill) -> None:
    run = mill.start("one-process", *ENDLESS)
    run.await_rows(10)
    run.await_that(lambda: entry(run, "main")["phase"] == "working")
    seen = set()

    def seen_anew() -> bool:
        seen.add(entry(run, "main")["doing"])
        return len(seen) >= 3

    run.await_that(seen_anew)
    assert all(re.match(r"(batch|step) \d+$", doing) for doing in seen)
    assert time.time() - entry(run, "main")["moved"] < 5
    assert entry(run, "main")["pid"] == run.process.pid
    assert_interrupted_in_time(run)


# --- broken


@pytest.fixture
def untied(tiny_target: Path, tmp_path: Path) -> Path:
    """The tiny target with a head of its own."""
    folder = tmp_path / "untied"
    shutil.copytree(tiny_target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def odd(tiny_target: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared set with words that occur in one document only."""
    folder = tmp_path_factory.mktemp("odd")
    rows = [json.loads(line) for line in conversations.read_text().splitlines()]
    for row, word in zip(rows[::10], ("zebra", "violin", "mountain", "honey", "winter", "doctor"), strict=True):
        row["messages"][1]["content"] += f" {word}"
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(PrepareConfig(inputs=[folder / "chat.jsonl"], output=folder / "set", model=str(tiny_target), workers=1))
    return folder / "set"


def word_of_one_document(prepared: Path) -> tuple[int, int]:
    """(document, token): in the third batch or later, and in no other document."""
    data = PreparedSet.open(prepared)
    ids = [set(data.document(number)[0].tolist()) for number in range(len(data))]
    plan = BatchPlan(data, 192, 0)
    for index in range(2, plan.batches_per_epoch):
        for document in plan.batch(index).documents:
            if own := ids[document] - set().union(*ids[:document], *ids[document + 1 :]):
                return document, min(own)
    raise AssertionError("no such word")


def test_states_that_are_not_finite_end_the_run_with_the_document(mill: Mill, untied: Path, odd: Path) -> None:
    document, token = word_of_one_document(odd)
    weights = load_file(untied / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = torch.nan
    save_file(weights, untied / "model.safetensors", metadata={"format": "pt"})
    run = mill.start("nan", *split(2, 1), f"target.model={untied}", f"data.prepared={odd}")
    assert run.end() == 2, run.said
    assert len(run.error_lines) == 1
    assert "a batch failed 3 times; hidden state of target layer 1 is not finite" in run.error_lines[0]
    assert f"document {document} of the prepared set" in run.error_lines[0]
    assert "try 2 of 3" in run.said
    assert "Traceback" not in run.said
    assert run.status()["phase"] == "failed"


def test_a_target_that_breaks_at_a_batch_ends_the_run_with_the_reason(mill: Mill, odd: Path, tmp_path: Path) -> None:
    import pyarrow as pa

    damaged = tmp_path / "damaged"
    shutil.copytree(odd, damaged)
    document, _ = word_of_one_document(odd)
    table = pa.ipc.open_file(damaged / DOCUMENTS_FILE).read_all()
    ids = table.column("input_ids").to_pylist()
    ids[document][0] = 60_000
    place = table.schema.get_field_index("input_ids")
    table = table.set_column(place, table.schema.field(place), pa.array(ids, table.schema.field(place).type))
    with pa.ipc.new_file(damaged / DOCUMENTS_FILE, table.schema) as writer:
        writer.write_table(table)
    run = mill.start("breaks", *split(1, 1), f"data.prepared={damaged}")
    assert run.end() == 2, run.said
    assert len(run.error_lines) == 1
    assert "a batch failed 3 times; IndexError in the target's forward of batch" in run.error_lines[0]
    assert re.search(rf"\(documents [^)]*\b{document}\b", run.error_lines[0])


def test_a_target_that_cannot_load_ends_the_run_with_the_reason(mill: Mill, tiny_target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_target, folder)
    run = mill.start("lost-weights", *split(1, 1), f"target.model={folder}")
    run.await_rows(6)
    (folder / "model.safetensors").unlink()
    run.worker("target-0").kill()
    assert run.end() == 2, run.said
    assert len(run.error_lines) == 1
    assert "no target is left; target-0 ended 3 times in a row: OSError: Error no file named" in run.error_lines[0]
    assert saved_step(run) == 5


@pytest.mark.long
def test_a_drafter_that_diverges_ends_the_run_with_the_reason(mill: Mill) -> None:
    run = mill.start("diverges", *split(1, 2), "train.lr=1e38", "train.max_steps=100")
    assert run.end() == 2, run.said
    assert len(run.error_lines) == 1
    assert "10 updates in a row had a non-finite gradient" in run.error_lines[0]
    assert "Traceback" not in run.said


# --- interrupted


def test_ctrl_c_while_loading_ends_at_once(mill: Mill) -> None:
    for name, devices in (("loading", split(2, 2)), ("loading-inline", ("devices.inline=cpu*2",))):
        run = mill.start(name, *devices)
        run.await_that(lambda run=run: "loading" in [run.phase(worker) for worker in run.status().get("workers", {})])
        run.interrupt()
        assert run.end(30) == 130, run.said
        assert "nothing was trained yet" in run.said
        assert "Traceback" not in run.said


def test_ctrl_c_saves_and_a_second_one_ends_at_once(mill: Mill, undisturbed: Run) -> None:
    run = mill.start("interrupted", "devices.inline=cpu*2")
    run.await_rows(6)
    run.interrupt()
    assert run.end(30) == 130, run.said
    step = saved_step(run)
    assert step == run.status()["step"]
    assert 6 <= step < STEPS
    again = mill.start("interrupted", *split(1, 1), "--resume")
    again.await_rows(step + 2)
    again.worker("drafter-0").suspend()
    again.interrupt()
    again.await_said("a second Ctrl-C ends the run at once")
    again.interrupt()
    assert again.end(30) == 130, again.said
    assert again.status()["phase"] == "stopped"
    assert saved_step(again) >= step
    assert_same(mill.train("interrupted", *split(2, 1), "--resume"), undisturbed)


def test_other_commands_end_in_time_too(
    undisturbed: Run, tiny_target: Path, conversations: Path, tmp_path: Path
) -> None:
    """Ctrl-C in the middle of their work."""
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(3000)))
    answers, prepared = tmp_path / "answers.jsonl", tmp_path / "prepared"
    large = tmp_path / "large.jsonl"
    large.write_text(conversations.read_text() * 3000)

    def answered() -> bool:
        return answers.exists() and answers.stat().st_size > 0

    for command, begun in (
        (("regenerate", many, "--model", tiny_target, "--output", answers, "--device", "cpu"), answered),
        (("prepare", large, "--model", tiny_target, "--output", prepared, "--workers", 2), large.exists),
        (("evaluate", undisturbed.folder, "--prompts", many, "--device", "cpu"), answered),
    ):
        errors = tmp_path / f"{command[0]}.err"
        with errors.open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "draftmill", *map(str, command)],
                stdout=subprocess.DEVNULL, stderr=err, text=True, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        run = Run(tmp_path, process, errors)
        try:
            run.await_that(lambda run=run, begun=begun: begun() and cpu_seconds(run.processes()) > 8)
            run.interrupt()
            assert run.end(30) == 130, run.said
        finally:
            run.kill_all()


# --- load


def test_memory_stays_flat_and_waiting_costs_nothing(mill: Mill) -> None:
    steps, slots = 200, 4
    run = mill.start(
        "load", *split(2, 1), f"handoff.slots={slots}", "train.accumulation=1", f"train.max_steps={steps}",
        "train.save_every=1000", "train.anchors=48", "drafter.layers=2",
    )  # fmt: skip
    run.await_rows(40)
    before = memory(run)
    assert waiting_share(run) < 0.05
    run.await_rows(steps - 10)
    after = memory(run)
    assert after[0] < 1.05 * before[0]
    assert after[1] < 2.5 * before[1]  # the heap of a CPU step goes up and down, with one process too
    assert run.end() == 0, run.said
    assert_each_batch_once(run, steps)
    waits = [row["waits"] for row in metrics(run.folder)]
    assert max(wait["slots_in_use"] for wait in waits) == slots
    assert waits[-1]["targets_wait"] > 0.5  # it is the drafter that holds them back


def memory(run: Run) -> tuple[int, int]:
    """Bytes that (supervisor and targets, drafter) hold for themselves. The slots are beside that, of fixed size."""
    drafter = run.worker("drafter-0")
    others = [process for process in run.processes() if process != drafter]
    return sum(map(own_bytes, others)), own_bytes(drafter)


def own_bytes(process: psutil.Process) -> int:
    info = process.memory_info()
    return int(info.rss - info.shared)


def waiting_share(run: Run) -> float:
    """Share of a core that supervisor and drafter use while the targets are stopped."""
    watched = [run.worker("drafter-0"), psutil.Process(run.process.pid)]
    with suspended(run.worker("target-0"), run.worker("target-1")):
        await_standstill(run)
        before, started = cpu_seconds(watched), time.monotonic()
        wait_for(lambda: time.monotonic() - started > 3)
        return (cpu_seconds(watched) - before) / (time.monotonic() - started)


def await_standstill(run: Run) -> None:
    """No step for a second."""
    last, since = -1, time.monotonic()

    def still() -> bool:
        nonlocal last, since
        if (count := len(metrics(run.folder))) != last:
            last, since = count, time.monotonic()
        return time.monotonic() - since > 1

    wait_for(still)


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))
