"""Several ranks train what one would: real processes over gloo. The jobs they do are in train_ranks.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from train_ranks import RUNS, SECOND, SPLITS, Ranks, Record, gradient, run_trainer, spawn, the_drafter
from train_tiny import CONFIG, FakeSource, make_drafter, make_trainer, same, weights

from draftmill.train.checkpoint import find_latest
from draftmill.train.parallel import Alone, DataParallel, total_over_ranks

EMPTY = ["never", "alternate", "tail", "none"]
DATA = [
    "data:splits", "data:watch", "data:whole", *(f"data:{name}" for name in EMPTY), "data:one_then_none", "data:broken",
    "data:diverged", "data:until_diverged", "data:stopped", "data:from_stopped", "data:stopped_and_on",
    "data:stopped_unevenly", "data:from_stopped_unevenly", "data:rare_lines", "data:rare_lines_stopped",
    "data:rare_lines_resumed",
]  # fmt: skip
FSDP = [
    "data:whole", "fsdp:splits", "fsdp:shards", "fsdp:sharded_sums", "fsdp:whole", *(f"fsdp:{name}" for name in EMPTY),
    "fsdp:one_then_none", "fsdp:broken", "fsdp:diverged", "fsdp:until_diverged", "fsdp:stopped", "fsdp:from_stopped",
    "fsdp:stopped_and_on", "fsdp:from_fsdp", "data:from_fsdp", "fsdp:from_alone", "data:from_alone",
]  # fmt: skip
KINDS = ["data", "fsdp"]
ORDER = [name for name, _ in reversed(list(the_drafter().named_parameters()))]  # in which gradients are summed


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return spawn(tmp_path_factory.mktemp("data"), 2, DATA)


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("fsdp")
    run_trainer("alone:whole", folder)
    return spawn(folder, 2, FSDP)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return spawn(tmp_path_factory.mktemp("four"), 4, ["data:whole", "fsdp:whole"])


@pytest.fixture
def two(request: pytest.FixtureRequest, kind: str) -> Ranks:
    """The two ranks of a kind."""
    ranks: Ranks = request.getfixturevalue(kind)
    return ranks


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """What a single rank makes of the same runs."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: run_trainer(f"alone:{name}", folder) for name in ("whole", "broken", *EMPTY)}


def close(first: dict[str, Tensor], second: dict[str, Tensor], *, within: float) -> bool:
    """Every entry within this share of the tensor's largest, never NaN."""
    return first.keys() == second.keys() and all(
        bool((first[name] - second[name]).abs().max() <= within * second[name].abs().max()) for name in first
    )


def alike(first: Any, second: Any, *, within: float = 5e-6) -> bool:
    """Log lines equal to rounding, never NaN."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(alike(first[key], second[key], within=within) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(alike(a, b, within=within) for a, b in zip(first, second, strict=True))
    if first is None or second is None:
        return first is second
    return bool(abs(first - second) <= within * max(1.0, abs(second)))


def trained_alike(first: Record, second: Record) -> bool:
    """Progress equal, weights and moments equal to rounding (seen: 3e-7 and 1e-6 of the largest)."""
    return (
        close(first["weights"], second["weights"], within=5e-6)
        and close(first["moments"], second["moments"], within=1e-5)
        and first["progress"] == second["progress"]
    )


def identical(first: Record, second: Record) -> bool:
    return (
        same(first["weights"], second["weights"])
        and same(first["moments"], second["moments"])
        and first["progress"] == second["progress"]
    )


@pytest.mark.parametrize("spawned", ["data", "fsdp", "four"])
def test_all_ranks_end_by_themselves(spawned: str, request: pytest.FixtureRequest) -> None:
    assert request.getfixturevalue(spawned).failure == ""


@pytest.mark.parametrize("kind", KINDS)
def test_case_19_the_gradient_does_not_depend_on_how_the_anchors_fall_over_the_ranks(two: Ranks, kind: str) -> None:
    whole = gradient(Alone(), (0, 1, 2, 3))
    assert len(whole["gradient"]) == len(list(the_drafter().parameters()))
    for record in two.records(f"{kind}:splits"):
        for name in ("alike", "apart", *(["uneven"] if kind == "data" else [])):
            assert sorted(sum(SPLITS[name], ())) == [0, 1, 2, 3]
            assert close(record[name]["gradient"], whole["gradient"], within=1e-6), name
            assert record[name]["weight"] == pytest.approx(whole["weight"], rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["one_of_two", "one_of_two_and_nan"])
def test_case_24_a_rank_without_anchor_adds_exactly_nothing(two: Ranks, kind: str, name: str) -> None:
    whole = gradient(Alone(), SPLITS[name][0])
    for record in two.records(f"{kind}:splits"):
        assert record[name]["weight"] == whole["weight"]
        assert close(record[name]["gradient"], whole["gradient"], within=1e-6)
        half = {key: value / 2 for key, value in record["twice"]["gradient"].items()}  # exact: both ranks had the same
        assert half.keys() == record[name]["gradient"].keys()
        assert all(torch.equal(record[name]["gradient"][key], half[key]) for key in half)


@pytest.mark.parametrize("kind", KINDS)
def test_case_24_ranks_without_anchor_add_up_to_exact_zeros(two: Ranks, kind: str) -> None:
    for record in two.records(f"{kind}:splits"):
        assert record["none_of_two"]["weight"] == 0
        assert record["none_of_two"]["gradient"].keys() == dict(the_drafter().named_parameters()).keys()
        assert all(bool((value == 0).all()) for value in record["none_of_two"]["gradient"].values())


@pytest.mark.parametrize(
    ("spawned", "kind", "ranks"), [("data", "data", 2), ("fsdp", "fsdp", 2), ("four", "data", 4), ("four", "fsdp", 4)]
)
def test_any_number_of_ranks_trains_what_one_does(
    spawned: str, kind: str, ranks: int, request: pytest.FixtureRequest, alone: dict[str, Record]
) -> None:
    records = request.getfixturevalue(spawned).records(f"{kind}:whole")
    assert len(records) == ranks
    for record in records:
        assert trained_alike(record, alone["whole"])
        assert same(record["weights"], records[0]["weights"])
        assert record["finished"] is True
        assert record["left"] == []
    assert len(records[0]["lines"]) == 5
    assert alike(records[0]["lines"], alone["whole"]["lines"])
    assert not close(records[0]["weights"], weights(the_drafter()), within=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_take_turns_and_only_the_first_logs_and_saves(two: Ranks, kind: str) -> None:
    first, second = two.records(f"{kind}:whole")
    for rank, record in enumerate((first, second)):
        wanted = [(what, 2 * place + rank) for place in range(10) for what in ("take", "release")]
        assert record["diary"] == wanted
    assert (first["saves"], second["saves"], second["lines"]) == (3, 0, [])
    names = sorted(path.name for path in (two.folder / f"{kind}-whole-0").iterdir())
    assert names == [SECOND, "step-00000004", "step-00000005"]
    assert not (two.folder / f"{kind}-whole-1").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_what_all_ranks_hold_together(two: Ranks, kind: str, alone: dict[str, Record]) -> None:
    record = two.records(f"{kind}:whole")[0]
    checkpoint, rejected = find_latest(two.folder / f"{kind}-whole-0")
    assert checkpoint is not None
    assert rejected == []
    assert same(load_file(checkpoint.path / "drafter.safetensors"), record["weights"])
    moments = load_file(checkpoint.path / "optimizer.safetensors")
    assert same(moments, record["moments"])
    shapes = {name: value.shape for name, value in alone["whole"]["moments"].items()}
    assert {name: value.shape for name, value in moments.items()} == shapes


def test_two_runs_of_two_ranks_are_bit_equal(data: Ranks, fsdp: Ranks) -> None:
    for first, second in zip(data.records("data:whole"), fsdp.records("data:whole"), strict=True):
        assert identical(first, second)
        assert first["lines"] == second["lines"]


def test_fully_sharded_ranks_train_what_data_parallel_ranks_do(fsdp: Ranks) -> None:
    for sharded, copied in zip(fsdp.records("fsdp:whole"), fsdp.records("data:whole"), strict=True):
        assert trained_alike(sharded, copied)
        assert alike(sharded["lines"], copied["lines"])
    assert all(line["gradient_norm"] > 0.1 for line in fsdp.records("fsdp:whole")[0]["lines"])


def test_fully_sharded_ranks_hold_a_part_each(fsdp: Ranks) -> None:
    first, second = fsdp.records("fsdp:shards")
    assert first.keys() == dict(the_drafter().named_parameters()).keys()
    for name, (whole, *parts) in first.items():
        others = second[name][1:]
        assert len(parts) == 4, "weights, gradients and two moments"
        assert all(0 < part < whole and part + other == whole for part, other in zip(parts, others, strict=True)), name


def test_fully_sharded_gradients_are_summed_once_a_step(fsdp: Ranks) -> None:
    for record in fsdp.records("fsdp:sharded_sums"):
        assert record["counts"] == [0, 0, len(ORDER)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EMPTY)
def test_case_24_ranks_without_anchor_wait_for_nobody_and_change_nothing(
    two: Ranks, kind: str, name: str, alone: dict[str, Record]
) -> None:
    first, second = two.records(f"{kind}:{name}")
    assert same(first["weights"], second["weights"])
    assert trained_alike(first, alone[name])
    assert alike(first["lines"], alone[name]["lines"])
    assert first["progress"] == second["progress"]
    assert first["progress"]["skipped"] == 0
    assert len(first["lines"]) == RUNS[name].steps


@pytest.mark.parametrize("kind", KINDS)
def test_case_24_no_anchor_anywhere_is_no_update_and_no_divergence(two: Ranks, kind: str) -> None:
    for record, reference in zip(two.records(f"{kind}:none"), two.records(f"{kind}:one_then_none"), strict=True):
        assert (record["error"], record["finished"]) == ("", True)
        assert record["progress"]["step"] == 13
        assert (record["progress"]["skipped"], record["progress"]["in_a_row"]) == (0, 0)
        assert same(record["weights"], reference["weights"])
        assert same(record["moments"], reference["moments"])


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("whole", 10, 16), ("tail", 10, 16), ("whole, one bucket", 1, 1), ("tail, one each", len(ORDER), len(ORDER))],
)
def test_each_gradient_is_summed_once_a_step_in_one_order(data: Ranks, name: str, least: int, most: int) -> None:
    records = data.records("data:watch")
    for record in records:
        for events in record[name]["steps"]:
            sums = [event for event in events if isinstance(event, list)]
            assert [name for names in sums for name in names] == ORDER
            assert sums == [event for event in records[0][name]["steps"][0] if isinstance(event, list)]
            assert least <= len(sums) <= most
            assert events[-1 - len(sums) :] == ["wait"] * len(sums) + ["totals"]
    assert same(records[0][name]["weights"], records[1][name]["weights"])


@pytest.mark.parametrize("name", ["whole", "whole, one bucket"])
def test_sums_begin_while_the_last_backward_runs(data: Ranks, name: str) -> None:
    for record in data.records("data:watch"):
        for events in record[name]["steps"]:
            last = [place for place, event in enumerate(events) if event == "backward"][-1]
            assert events.count("backward") == 2
            begun = [place for place, event in enumerate(events) if isinstance(event, list)]
            assert begun[0] > last
            assert begun[-1] < len(events) - 1 - events[::-1].index("end")
            if name == "whole":
                behind = [event for event in events[begun[0] :] if str(event).startswith("complete")]
                assert len(behind) >= len(ORDER) // 2


def test_the_sums_of_a_rank_without_backward_go_after_it_in_the_same_order(data: Ranks) -> None:
    first, second = (record["tail"]["steps"] for record in data.records("data:watch"))
    assert [events.count("backward") for events in first] == [1, 2]
    assert [events.count("backward") for events in second] == [2, 1]
    last = len(first[0]) - 1 - first[0][::-1].index("end")
    assert all(isinstance(event, list) for event in first[0][last + 1 : first[0].index("wait")])
    assert not any(isinstance(event, list) for event in first[0][:last])


def test_buckets_of_any_size_give_one_result(data: Ranks) -> None:
    record = data.records("data:watch")[0]
    assert same(record["whole"]["weights"], record["whole, one bucket"]["weights"])
    assert same(record["tail"]["weights"], record["tail, one each"]["weights"])


@pytest.mark.parametrize("kind", KINDS)
def test_case_23_a_bad_gradient_on_one_rank_is_skipped_by_all_and_counted_once(
    two: Ranks, kind: str, alone: dict[str, Record]
) -> None:
    first, second = two.records(f"{kind}:broken")
    assert same(first["weights"], second["weights"])
    assert first["progress"] == second["progress"]
    assert first["progress"]["skipped"] == 2
    assert [line["skipped"] for line in first["lines"]] == [0, 1, 1, 2, 2]
    assert [line["gradient_norm"] is None for line in first["lines"]] == [False, True, False, True, False]
    assert trained_alike(first, alone["broken"])
    assert alike(first["lines"], alone["broken"]["lines"])


@pytest.mark.parametrize("kind", KINDS)
def test_case_23_ten_in_a_row_end_the_run_on_every_rank(two: Ranks, kind: str) -> None:
    references = two.records(f"{kind}:until_diverged")
    for record, reference in zip(two.records(f"{kind}:diverged"), references, strict=True):
        assert "10 updates in a row" in record["error"]
        assert record["progress"]["step"] == 12
        assert record["progress"]["skipped"] == 10
        assert same(record["weights"], reference["weights"]), "the weights are those before them"


@pytest.mark.parametrize(
    ("kind", "name"), [("data", "stopped"), ("data", "stopped_unevenly"), ("fsdp", "stopped")]
)  # fully sharded ranks wait for each other in every micro-step, so there all must end at the same
def test_a_stop_in_the_middle_of_accumulation_leaves_the_last_finished_step(two: Ranks, kind: str, name: str) -> None:
    stopped, resumed = two.records(f"{kind}:{name}"), two.records(f"{kind}:from_{name}")
    for rank, (before, after, whole) in enumerate(zip(stopped, resumed, two.records(f"{kind}:whole"), strict=True)):
        assert before["finished"] is False
        assert before["progress"]["step"] == 2
        assert before["left"] == []
        assert after["diary"][0] == ("take", 8 + rank)
        assert identical(after, whole)
        assert before["lines"] + after["lines"] == whole["lines"]
    at_two = load_file(two.folder / f"{kind}-whole-0" / SECOND / "drafter.safetensors")
    assert same(stopped[0]["weights"], at_two)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_step_that_was_thrown_away_is_left_in_the_ranks(two: Ranks, kind: str) -> None:
    for record, whole in zip(two.records(f"{kind}:stopped_and_on"), two.records(f"{kind}:whole"), strict=True):
        assert record["diary"][4:6] == whole["diary"][4:6]
        assert record["diary"][10:12] == whole["diary"][8:10], "the first batch of the third step is taken twice"
        assert record["finished"] is True
        assert identical(record, whole)
        assert record["lines"] == whole["lines"]


def test_a_log_line_over_a_stop_is_that_of_the_whole_run(data: Ranks) -> None:
    whole, stopped, resumed = (
        data.records(f"data:rare_lines{end}")[0]["lines"] for end in ("", "_stopped", "_resumed")
    )
    assert (len(whole), len(stopped)) == (1, 0)
    assert resumed == whole


def test_fully_sharded_ranks_go_on_from_their_checkpoint_bit_by_bit(fsdp: Ranks) -> None:
    for resumed, whole in zip(fsdp.records("fsdp:from_fsdp"), fsdp.records("fsdp:whole"), strict=True):
        assert resumed["diary"][0][1] in (8, 9)
        assert identical(resumed, whole)
        assert resumed["lines"] == whole["lines"][2:]


@pytest.mark.parametrize("job", ["data:from_fsdp", "fsdp:from_alone", "data:from_alone"])
def test_a_checkpoint_of_one_kind_is_resumed_by_another(fsdp: Ranks, alone: dict[str, Record], job: str) -> None:
    for record in fsdp.records(job):
        assert record["diary"][0][1] in (8, 9)
        assert trained_alike(record, alone["whole"])
    assert alike(fsdp.records(job)[0]["lines"], alone["whole"]["lines"][2:])


def test_a_checkpoint_of_fully_sharded_ranks_is_resumed_by_one(fsdp: Ranks, alone: dict[str, Record]) -> None:
    fsdp.records("fsdp:whole")
    record = run_trainer("alone:from_fsdp", Path(fsdp.folder))
    assert record["diary"][0] == ("take", 8)
    assert trained_alike(record, alone["whole"])
    assert alike(record["lines"], alone["whole"]["lines"][2:])


class DeviceTraffic(TorchDispatchMode):
    """Numbers that go between host and device: on a GPU each waits for all the work before it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.uploads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        self.uploads += func is torch.ops.aten.lift_fresh.default  # what torch.tensor([…]) is made by
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("by_autograd", [True, False])
def test_sums_wait_for_the_end_where_autograd_does_not_say_what_is_complete(
    by_autograd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused step adds to the norms' gradients in several backward passes and to the matrices' without autograd."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    begun: list[float] = []
    monkeypatch.setattr(
        dist, "all_reduce", lambda flat, async_op: begun.append(float(flat.abs().max())) or SimpleNamespace(wait=int)
    )
    parallel, drafter = DataParallel(bucket_bytes=1), make_drafter()
    parallel.prepare(drafter, by_autograd=by_autograd)
    during = []
    with parallel.micro_step(last=True):
        for _ in range(2):  # two groups of blocks
            sum(p.sum() for p in drafter.parameters() if p.ndim == 1).backward()
            during.append(len(begun))
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                parameter.grad = torch.ones_like(parameter)
    assert (during[-1] > 0) == by_autograd
    assert len(begun) == len(list(drafter.parameters()))
    if not by_autograd:
        assert sorted(set(begun)) == [1.0, 2.0], "each sum begins with what both groups gave"


def test_an_update_of_several_ranks_never_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)
    trainer = make_trainer(tmp_path, FakeSource(), 5, config=CONFIG.model_copy(update={"log_every": 100}))
    for _ in range(2):  # the first update makes the moments
        summed = trainer._accumulate()
        assert summed is not None
        with DeviceTraffic() as traffic:
            sums, tokens = total_over_ranks(summed[0], torch.full((), 123_456_789))
            trainer._update(sums, tokens)
    assert tokens == 123_456_789
    # the one read is of the host's own copy of the count of skipped updates
    assert (traffic.reads, traffic.uploads) == (1, 0)


def test_a_rank_that_fails_is_shown_and_the_others_do_not_hang(tmp_path: Path) -> None:
    ended = spawn(tmp_path, 2, ["data:no such job"])
    assert ended.failure.startswith("ended with 1")
    assert "KeyError: 'no such job'" in ended.failure
    with pytest.raises(pytest.fail.Exception, match="was not done by all ranks"):
        ended.records("data:no such job")


def test_ranks_that_take_too_long_are_killed_and_shown(tmp_path: Path) -> None:
    assert spawn(tmp_path, 2, ["data:whole"], seconds=0.5).failure.startswith("not done within 0.5 s")
