"""Which device does what: as named, as refused, as chosen by measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from draftmill.config import DevicesConfig, RunConfig, load_run_config
from draftmill.errors import UserError
from draftmill.run import placement
from draftmill.run.build import build
from draftmill.run.placement import Placement, available_memory, default_slots, settle, threads_per_process
from draftmill.run.split import Measured, explain, measure, measure_here, share_out

FOUR = tuple(f"cuda:{n}" for n in range(4))
EIGHT = tuple(f"cuda:{n}" for n in range(8))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (0, ("cuda:0",)),
        ([0, 2], ("cuda:0", "cuda:2")),
        ("cpu", ("cpu",)),
        ("cpu*3", ("cpu", "cpu", "cpu")),
        (["cpu", "cpu*2"], ("cpu", "cpu", "cpu")),
        ("cuda:1", ("cuda:1",)),
        (["cuda:1", 3], ("cuda:1", "cuda:3")),
    ],
)
def test_devices_are_written_in_these_ways(given: object, wanted: tuple[str, ...]) -> None:
    assert DevicesConfig(inline=given).inline == wanted
    split = DevicesConfig(targets=given, drafters="cpu")
    assert (split.targets, split.drafters) == (wanted, ("cpu",))


@pytest.mark.parametrize("given", ["cuda", "cpu*", "cpu*x", -1, 1.5, True, "cuda:x", [], [0, 0], "cpu*0", ["tpu"]])
def test_anything_else_is_refused(given: object) -> None:
    with pytest.raises(ValidationError, match=r"not a device|listed twice|at least one device"):
        DevicesConfig(inline=given)


def test_half_a_split_and_both_ways_at_once_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"devices\.drafters is missing"):
        DevicesConfig(targets="cpu")
    with pytest.raises(ValidationError, match=r"devices\.targets is missing"):
        DevicesConfig(drafters="cpu")
    with pytest.raises(ValidationError, match=r"leave devices\.targets and drafters out"):
        DevicesConfig(targets="cpu", drafters="cpu", inline="cpu")


def run_config(**values: object) -> RunConfig:
    base = {"run_dir": "r", "data": {"prepared": "p"}, "target": {"model": "m"}}
    return RunConfig.model_validate(base | values)


def test_short_forms() -> None:
    assert run_config().devices == run_config(devices="auto").devices == DevicesConfig()
    assert run_config(devices="cpu").devices.inline == ("cpu",)
    assert run_config(devices="cuda").devices.inline == ("cuda:0",)
    assert run_config(devices="cpu*2").devices.inline == ("cpu", "cpu")


def test_an_override_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("run_dir: r\ndata: {prepared: p}\ntarget: {model: m}\n")
    config = load_run_config(path, ["devices.targets=[0,1]", "devices.drafters=2"])
    assert (config.devices.targets, config.devices.drafters) == (("cuda:0", "cuda:1"), ("cuda:2",))
    with pytest.raises(UserError, match=r"devices: devices\.targets is missing"):
        load_run_config(path, ["devices.drafters=cpu"])


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_auto_is_inline_on_one_device_and_open_on_several(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, wanted in ((0, Placement((), ("cpu",))), (1, Placement((), ("cuda:0",))), (2, None)):
        with_gpus(monkeypatch, count)
        assert settle(DevicesConfig(), 4) == wanted
    with_gpus(monkeypatch, 2)
    assert settle(DevicesConfig(targets=[0], drafters=[1]), 4) == Placement(("cuda:0",), ("cuda:1",))
    assert settle(DevicesConfig(inline=[0, 1]), 4) == Placement((), ("cuda:0", "cuda:1"))


def test_what_the_host_lacks_and_uneven_shares_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1)
    with pytest.raises(UserError, match=r"devices: cuda:1, but torch sees 1 CUDA device;"):
        settle(DevicesConfig(targets=[0], drafters=[1]), 4)
    with pytest.raises(UserError, match=r"4 batches per step cannot be shared evenly by 3 .*train\.accumulation=6"):
        settle(DevicesConfig(inline="cpu*3"), 4)
    with pytest.raises(UserError, match="CPU and CUDA at once"):
        settle(DevicesConfig(inline=["cpu", 0]), 4)
    assert settle(DevicesConfig(targets=0, drafters="cpu"), 1) == Placement(("cuda:0",), ("cpu",))


def test_slots_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_slots(Placement(("cpu",), ("cpu",))) == 3
    assert default_slots(Placement(EIGHT[:5], EIGHT[5:])) == 5
    assert threads_per_process(3, 8) == 3
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda _: set(range(8)))
    assert [threads_per_process(None, n) for n in (1, 3, 8, 20)] == [8, 2, 1, 1]


def test_available_memory_is_bounded_by_the_host() -> None:
    import psutil

    assert 0 < available_memory() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("target", "drafter", "accumulation", "wanted", "rate"),
    [
        (1.0, 1.0, 8, Placement((), EIGHT), 4.0),  # each does both: nobody waits
        (5.0, 3.0, 8, Placement((), EIGHT), 1.0),
        (1.0, 1.0, 1, Placement(EIGHT[:7], EIGHT[7:]), 1.0),  # one rank only: the others can still be targets
        (7.0, 1.0, 1, Placement(EIGHT[:7], EIGHT[7:]), 1.0),
        (0.1, 1.0, 4, Placement(EIGHT[:4], EIGHT[4:]), 4.0),
    ],
)
def test_where_both_fit_one_device(
    target: float, drafter: float, accumulation: int, wanted: Placement, rate: float
) -> None:
    choice = share_out(EIGHT, Measured(target, drafter, together=True), accumulation)
    assert choice.placement == wanted
    assert choice.batches_per_second == pytest.approx(rate)


@pytest.mark.parametrize(
    ("target", "drafter", "accumulation", "wanted", "rate"),
    [
        (5.0, 3.0, 3, Placement(EIGHT[:5], EIGHT[5:]), 1.0),  # the 27B shape: 5 targets feed 3 drafters
        (5.0, 3.0, 4, Placement(EIGHT[:4], EIGHT[4:]), 0.8),  # 3 ranks do not divide 4
        (1.0, 30.0, 7, Placement(EIGHT[:1], EIGHT[1:]), 7 / 30),
    ],
)
def test_where_they_do_not(target: float, drafter: float, accumulation: int, wanted: Placement, rate: float) -> None:
    choice = share_out(EIGHT, Measured(target, drafter, together=False), accumulation)
    assert choice.placement == wanted
    assert choice.batches_per_second == pytest.approx(rate)


def test_idle_devices_are_said_and_one_device_is_too_few() -> None:
    measured = Measured(1.0, 3.0, together=True)  # three ranks do 3/4 a second; 1 target + 3 ranks would do as much
    even = Measured(3.0, 3.0, together=True)
    assert len(explain(share_out(FOUR, measured, 4), measured)) == 2
    idle = share_out(FOUR, even, 3)
    assert (idle.placement, idle.idle) == (Placement((), FOUR[:3]), 1)
    lines = explain(idle, even)
    assert lines[-1].startswith("warning: 1 devices stay idle")
    assert "train.accumulation=4 would use all" in lines[-1]
    with pytest.raises(UserError, match="do not fit one GPU together"):
        share_out(("cuda:0",), Measured(1.0, 1.0, together=False), 1)


def test_no_other_use_of_the_devices_is_faster() -> None:
    draw = torch.Generator().manual_seed(torch.seed() % 2**32)
    for _ in range(200):
        target, drafter = (float(x) for x in torch.rand(2, generator=draw) + 0.01)
        accumulation = int(torch.randint(1, 13, (1,), generator=draw))
        together = bool(torch.rand(1, generator=draw) < 0.5)
        best = share_out(EIGHT, Measured(target, drafter, together), accumulation)
        for ranks in (n for n in range(1, 9) if accumulation % n == 0):
            split = min((8 - ranks) / target, ranks / drafter)
            inline = ranks / (target + drafter) if together else 0.0
            assert best.batches_per_second >= max(split, inline) * (1 - 1e-9)
        assert accumulation % best.placement.ranks == 0


@pytest.mark.slow
def test_measuring_on_a_real_device(tiny_target: Path, prepared: Path) -> None:
    config = run_config(
        data={"prepared": str(prepared), "token_budget": 192}, target={"model": str(tiny_target)},
        drafter={"layers": 1, "block_size": 4}, devices="cpu",
    )  # fmt: skip
    spec = build(config).spec
    here = measure_here(config, spec, "cpu")
    assert here.together
    assert here.target_seconds > 0
    assert here.drafter_seconds > 0
    elsewhere = measure(config, spec, "cpu")
    assert elsewhere.together
    broken = config.model_copy(update={"data": config.data.model_copy(update={"prepared": Path("nowhere")})})
    with pytest.raises(UserError, match="auto could not measure on cpu: UserError: nowhere"):
        measure(broken, spec, "cpu")
