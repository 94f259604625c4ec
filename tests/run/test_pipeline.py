"""Runs of several processes: the same config gives the same drafter, whoever computes what."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mill import SHARED, STEPS, Mill, Run, assert_close, assert_each_batch_once, assert_same, split
from run_helpers import metrics, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mill(tiny_target: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mill]:
    before = set(SHARED.iterdir())
    with Mill.opened(tmp_path_factory.mktemp("mill"), tiny_target, prepared) as mill:
        yield mill
    wait_for(lambda: set(SHARED.iterdir()) <= before, 30)  # other tests' files may come and go


@pytest.fixture(scope="module")
def alone(mill: Mill) -> Run:
    """One process that does it all."""
    run = mill.train("alone")
    assert_each_batch_once(run)
    return run


@pytest.mark.parametrize(
    ("targets", "arguments"),
    [
        pytest.param(1, ("handoff.slots=16",), marks=pytest.mark.long),
        (2, ("handoff.slots=1",)),
        pytest.param(3, ("handoff.queue=host",), marks=pytest.mark.long),
    ],
)
def test_any_number_of_targets_and_slots_gives_the_same_drafter(
    mill: Mill, alone: Run, targets: int, arguments: tuple[str, ...]
) -> None:
    run = mill.train(f"targets-{targets}", *split(targets, 1), *arguments)
    assert_same(run, alone)
    slots = {1: 16, 2: 1, 3: 7}[targets]
    assert f"hidden states: {slots} slot" in run.said
    assert all(row["waits"]["slots_in_use"] <= slots for row in metrics(run.folder))


def test_hidden_states_lie_in_memory_without_a_name(mill: Mill, alone: Run) -> None:
    """So neither the size of /dev/shm nor what is in it matters, and nothing can be left there."""
    run = mill.start("nameless", *split(2, 2))
    run.await_rows(1)
    for worker in run.status()["workers"]:
        files = {file.path for file in run.worker(worker).memory_maps()}
        assert any("memfd:draftmill-hidden-states" in file for file in files), worker
        assert not any(file.startswith(str(SHARED)) for file in files), worker
    assert run.end() == 0
    assert_same(run, alone)  # two ranks, two batches a step: one addition, which has no order


def test_ranks_that_run_the_target_themselves_equal_ranks_that_are_supplied(mill: Mill) -> None:
    options = ("train.accumulation=4", "decode_check_prompts=2")
    inline = mill.train("inline", "devices.inline=cpu*2", *options)
    supplied = mill.train("supplied", *split(2, 2), *options)
    assert_same(supplied, inline, batches=4 * STEPS)
    assert_each_batch_once(inline, 4 * STEPS)
    one_rank = mill.train("one-rank", options[0])
    assert_close(inline, one_rank)
    for run in (inline, supplied):
        assert "100% of blocks agree" in run.said
        assert run.status()["decode_check"]["flagged"] is False
        lines = (run.folder / "events.jsonl").read_text().splitlines()
        phases = [event for event in map(json.loads, lines) if event["kind"] == "phase" and "worker" not in event]
        assert [event["text"] for event in phases].count("checking") == 1


def test_interrupted_and_resumed_with_other_targets_is_the_same_run(mill: Mill, alone: Run) -> None:
    run = mill.start("resumed", *split(1, 1))
    run.await_rows(6)
    run.interrupt()
    assert run.end(30) == 130, run.said
    assert 6 <= run.status()["step"] < STEPS
    resumed = mill.train("resumed", *split(3, 2), "--resume")
    assert "resuming from" in resumed.said
    assert_same(resumed, alone)


def test_a_drafter_in_parts_is_the_same_drafter_and_resumes_as_a_whole(mill: Mill) -> None:
    whole = mill.train("whole", "train.accumulation=4")
    run = mill.start("parts", *split(1, 2), "parallel=fsdp", "train.accumulation=4")
    run.await_rows(6)
    run.interrupt()
    assert run.end(30) == 130, run.said
    resumed = mill.train("parts", "train.accumulation=4", "--resume")
    assert_close(resumed, whole)
    assert_each_batch_once(resumed, 4 * STEPS)


WRONG = [
    (("devices.inline=cpu*3",), r"train\.accumulation: 2 .* set train\.accumulation=3"),
    (("devices.targets=cpu",), r"devices\.drafters is missing"),
    (("devices.targets=cpu", "devices.drafters=cpu", "devices.inline=cpu"), r"devices\.inline means"),
    (("devices.inline=tpu",), r"'tpu' is not a device"),
    (("devices.inline=cuda:99",), r"devices: cuda:99, but torch sees \d+ CUDA device"),
    (("parallel=fsdp",), r"parallel: fsdp spreads the drafter over several ranks"),
    ((*split(1, 1), "handoff.slots=100000000"), r"handoff\.slots: 100000000 slots .* set handoff\.slots=\d+"),
]


def test_wrong_devices_are_one_line_before_anything_starts(mill: Mill) -> None:
    runs = [mill.start(f"wrong-{number}", *arguments) for number, (arguments, _) in enumerate(WRONG)]
    for run, (arguments, pattern) in zip(runs, WRONG, strict=True):
        assert run.end() == 2, (arguments, run.said)
        assert len(run.error_lines) == 1, run.said
        assert re.search(pattern, run.error_lines[0]), run.said
        assert "Traceback" not in run.said
        assert "workers" not in run.status()


@pytest.mark.long
def test_a_run_ended_by_its_time_limit_is_checked_wherever_it_runs(mill: Mill) -> None:
    """Not only a finished one: in one process, supplied by a target, and inline on two devices."""
    limit = ("train.max_minutes=0.02", "train.max_steps=100000", "train.epochs=100000", "decode_check_prompts=2")
    for name, devices in (("one", ()), ("pair", split(1, 1)), ("both", ("devices.inline=cpu*2",))):
        run = mill.train(f"limited-{name}", *devices, *limit)
        assert "train.max_minutes (0.02) is over" in run.said
        assert len(re.findall(r"decode check: τ .* blocks agree", run.said)) == 1, run.said
        assert run.status()["decode_check"]["flagged"] is False
        assert_each_batch_once(run, run.status()["step"] * 2)
