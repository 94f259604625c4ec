"""`draftmill profile`: what a trace says, a worker's recording, live runs that are profiled and not changed by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mill import Mill, Run, assert_each_batch_once, rows, split, weights
from rich.console import Console
from run_helpers import wait_for

from draftmill.errors import UserError
from draftmill.run import profile as command
from draftmill.run import profiling
from draftmill.run.files import RunFolder
from draftmill.run.messages import Profile
from draftmill.run.profile import profile
from draftmill.run.profile_table import copy_lines, gap_lines, headline, rendered
from draftmill.run.profile_trace import Summary, family_of, read_trace, summarise
from draftmill.run.profiling import FOLDER, REQUEST, WORKERS, Profiler, Requests, accept, listening
from draftmill.run.status import StatusWriter


def event(cat: str, name: str, start: float, length: float, tid: int = 7, **arguments: Any) -> dict[str, Any]:
    """Times in µs, as in a trace."""
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "pid": 1, "tid": tid, "args": arguments}


GEMM = "void cutlass::Kernel2<sm90_xmma_gemm_bf16>"
GPU_EVENTS = [
    event("cpu_op", "aten::mm", 0, 5000, tid=1),  # the host is not the timeline
    event("kernel", GEMM, 1000, 400),
    event("kernel", "_cross_entropy", 1300, 200, tid=13),  # another stream, 100 µs of it at the same time
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1600, 100, bytes=2_000_000),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1700, 100, bytes=4_000_000),
    event("kernel", GEMM, 2000, 500),
    event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2600, 400),
    event("gpu_user_annotation", "ProfilerStep#1", 1000, 2000),
]


def test_kernels_gaps_and_copies_of_a_device() -> None:
    summary = summarise(GPU_EVENTS)
    assert summary.timeline == "GPU"
    assert summary.span_seconds == pytest.approx(2000e-6)
    assert summary.busy_seconds == pytest.approx((500 + 200 + 500 + 400) * 1e-6)
    assert summary.work_seconds == pytest.approx(1700e-6)
    assert [(f.name, f.count, round(f.seconds * 1e6)) for f in summary.families] == [
        ("matrix products", 2, 900), ("loss", 1, 200), ("copies", 2, 200), ("collectives", 1, 400)
    ]  # fmt: skip
    assert (summary.top[0].name, summary.top[0].count) == (GEMM, 2)
    gaps = [(round(gap.seconds * 1e6), gap.after[:8], gap.before[:8]) for gap in summary.gaps]
    assert gaps == [(200, "Memcpy H", "void cut"), (100, "_cross_e", "Memcpy H"), (100, "void cut", "ncclDevK")]
    assert summary.gap_count == 3
    (copy,) = summary.copies
    assert (copy.count, copy.bytes, round(copy.seconds * 1e6)) == (2, 6_000_000, 200)
    assert summary.to_dict()["idle_seconds"] == pytest.approx(400e-6)


def test_operations_of_a_cpu_count_without_those_that_they_call() -> None:
    events = [
        event("cpu_op", "aten::linear", 0, 100, tid=1),
        event("cpu_op", "aten::addmm", 10, 80, tid=1),
        event("cpu_op", "aten::copy_", 20, 30, tid=1),
        event("cpu_op", "aten::silu", 100, 50, tid=1),  # begins as the one before ends
        event("cpu_op", "aten::_log_softmax", 250, 50, tid=1),
        event("cpu_op", "aten::mm", 0, 90, tid=2),  # another thread, with less to do
        event("python_function", "train.py", 0, 900, tid=1),
    ]
    summary = summarise(events)
    assert summary.timeline == "CPU"
    times = {operation.name: round(operation.seconds * 1e6) for operation in summary.top}
    assert list(times.values()) == [50, 50, 50, 30, 20]
    assert (times["aten::linear"], times["aten::addmm"], times["aten::copy_"]) == (20, 50, 30)
    assert summary.work_seconds == summary.busy_seconds == pytest.approx(200e-6)
    assert [(round(gap.seconds * 1e6), gap.after, gap.before) for gap in summary.gaps] == [
        (100, "aten::silu", "aten::_log_softmax")
    ]
    assert [(copy.kind, copy.bytes) for copy in summary.copies] == [("aten::copy_", None)]


def test_names_of_kernels_belong_to_families() -> None:
    """As torch, cuBLAS, fla and the package's own kernels are named in traces."""
    names = {
        "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "matrix products",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "matrix products",
        "aten::addmm": "matrix products",
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4, cutlass::bfloat16_t>>": "attention",
        "backward_context": "attention",
        "_forward": "attention",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": "attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
        "void at::native::cunn_SoftMaxForward<8, float, float, float, LogSoftMaxForwardEpilogue>": "loss",
        "_cross_entropy": "loss",
        "_forward_kernel": "norms and elementwise",
        "_both_kernel": "norms and elementwise",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": "norms and elementwise",
        "triton_red_fused_add_mul_0": "norms and elementwise",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(TensorIterator&)>": "copies",
        "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor>": "optimizer",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL": "collectives",
        "gloo:all_reduce": "collectives",
        "aten::view": "other",
    }
    assert {name: family_of(name) for name in names} == names


def shown(summary: Summary, **result: Any) -> str:
    values = {"worker": "drafter-0", "role": "drafter", "device": "cuda:1", "unit": "steps", "asked": 2, "count": 2,
              "seconds": 0.25, "trace": "t", "error": None, **result}  # fmt: skip
    console = Console(width=160, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    for part in rendered(values, summary):
        console.print(part)
    return console.export_text()


def test_the_table_gives_times_for_one_step() -> None:
    summary = summarise(GPU_EVENTS)
    text = shown(summary)
    assert "drafter-0 (drafter, cuda:1)" in text
    assert "2 steps in 0.25 s; the GPU was busy 80.0% of 2.00 ms, idle 20.0%" in text
    line = next(line for line in text.splitlines() if line.strip().startswith("matrix products"))
    assert line.split()[2:] == ["450.0", "µs", "52.9%", "1.0"]
    assert "gaps: 3, together 400.0 µs" in text
    assert list(copy_lines(summary, 2, "step")) == [
        "copies: Memcpy HtoD (Pinned -> Device): 1.0 a step, 100.0 µs, 3.0 MB a step, 30.0 GB/s"
    ]
    assert next(iter(gap_lines(summary))).startswith("gaps: 3")
    few = headline({"asked": 5, "count": 2, "unit": "batches", "seconds": 1.0}, summary)
    assert few.startswith("2 of 5 batches in 1 s")


# --- a worker's recording ---------------------------------------------------------------------------------------------


def nobody(_activity: str, _what: str) -> None:
    pass


def work(profiler: Profiler, numbers: Iterator[int] | range, parts: int = 1) -> None:
    for number in numbers:
        for _ in range(parts):
            profiler.at(number)
            torch.ones(64, 64) @ torch.ones(64, 64)


def answer(folder: Path, name: str = "drafter-0") -> dict[str, Any]:
    return dict(json.loads((folder / f"{name}.result.json").read_text()))


def test_a_recording_holds_whole_steps_from_the_next_one_on(tmp_path: Path) -> None:
    profiler = Profiler("drafter-0", "drafter", "steps", "cpu", nobody)
    work(profiler, range(3), parts=2)
    profiler.request(Profile(str(tmp_path), 2))
    work(profiler, iter([2]))  # the rest of the step that had begun
    assert not (tmp_path / "drafter-0.json").exists()
    work(profiler, range(3, 8), parts=2)
    result = answer(tmp_path)
    assert (result["count"], result["error"], result["trace"]) == (2, None, "drafter-0.json")
    families = summarise(read_trace(tmp_path / "drafter-0.json")).families
    assert next(f.count for f in families if f.name == "matrix products") == 2 * 2


def test_what_ends_early_is_kept_and_what_never_began_is_said(tmp_path: Path) -> None:
    profiler = Profiler("drafter-0", "drafter", "steps", "cpu", nobody)
    profiler.request(Profile(str(tmp_path), 9))
    work(profiler, range(4))
    profiler.request(Profile(str(tmp_path / "second"), 1))  # its folder is gone: nobody is told, nothing fails
    profiler.finish()
    assert (answer(tmp_path)["count"], answer(tmp_path)["asked"]) == (4, 9)
    profiler.request(Profile(str(tmp_path), 1))
    profiler.finish()
    assert answer(tmp_path)["error"] == "the run was over before it began"


def test_a_profiler_that_fails_is_an_answer_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = Profiler("drafter-0", "drafter", "steps", "cpu", nobody)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUPTI says no\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler, "profile", refuse)
        profiler.request(Profile(str(tmp_path), 1))
        work(profiler, range(2))
    assert answer(tmp_path)["error"] == "RuntimeError: CUPTI says no"
    profiler.request(Profile(str(tmp_path), 1))
    profiler.at(5)
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", refuse)
    profiler.at(6)
    assert (answer(tmp_path)["error"], answer(tmp_path)["trace"]) == ("RuntimeError: CUPTI says no", None)
    monkeypatch.undo()
    profiler.request(Profile(str(tmp_path), 1))
    work(profiler, range(7, 9))
    assert answer(tmp_path)["error"] is None


# --- requests ---------------------------------------------------------------------------------------------------------


def test_requests_are_taken_once_and_old_or_broken_ones_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / REQUEST).write_text(json.dumps({"name": "old", "steps": 3}))
    before = time.time() - 5
    os.utime(tmp_path / REQUEST, (before, before))
    monkeypatch.setattr(profiling, "LOOK_SECONDS", 0.0)
    with RunFolder(tmp_path).locked():
        assert Requests(RunFolder(tmp_path)).take() is None
    assert not (tmp_path / REQUEST).exists()
    with RunFolder(tmp_path).locked():
        (tmp_path / REQUEST).write_text(json.dumps({"name": "new", "steps": 3}))  # while the run loads
        requests = Requests(RunFolder(tmp_path))
    monkeypatch.setattr(profiling, "LOOK_SECONDS", 60.0)
    assert requests.take() is None, "it looks once a second"
    monkeypatch.setattr(profiling, "LOOK_SECONDS", 0.0)
    assert requests.take() == Profile(str(tmp_path / FOLDER / "new"), 3)
    assert requests.take() is None
    (tmp_path / REQUEST).write_text("not a request")
    assert requests.take() is None
    accept(Profile(str(tmp_path / "gone"), 1), {"main": 1})  # no folder: no error


@pytest.fixture
def live(tmp_path: Path) -> Iterator[RunFolder]:
    """What the command sees of a run that trains."""
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        StatusWriter(folder).phase("training", total_steps=9, step=1)
        yield folder


def test_only_a_live_run_can_be_asked(tmp_path: Path, live: RunFolder) -> None:
    with pytest.raises(UserError, match="holds no run"):
        profile(tmp_path / "nowhere", 1, Console(quiet=True))
    with pytest.raises(UserError, match="--steps 0: at least one"):
        profile(live.root, 0, Console(quiet=True))
    (live.root / REQUEST).write_text("{}")
    with pytest.raises(UserError, match="has a request for a profile already"):
        profile(live.root, 1, Console(quiet=True))
    (live.root / REQUEST).unlink()
    StatusWriter(live).phase("finished", step=9)
    with pytest.raises(UserError, match=r"is not running \(finished\)"):
        profile(live.root, 1, Console(quiet=True))


def test_who_waits_in_vain_is_told_what_the_run_does(live: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PATIENCE_SECONDS", 0.5)
    status = StatusWriter(live)
    status.phase("loading")
    status.update(workers={"target-0": {"phase": "loading", "since": time.time() - 65, "pid": 1}})
    with pytest.raises(UserError, match=r"the run is loading since . s; target-0 is loading since 1 min 0. s"):
        profile(live.root, 1, Console(quiet=True))
    assert not (live.root / REQUEST).exists(), "withdrawn"


def test_a_worker_that_ends_meanwhile_is_no_reason_to_wait(live: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    status = StatusWriter(live)
    status.phase("training", total_steps=9, step=1)
    status.update(workers={"drafter-0": {"phase": "working", "since": 0, "pid": 11}})
    monkeypatch.setattr(profiling, "LOOK_SECONDS", 0.0)
    requests = Requests(live)

    def run() -> None:
        found: list[Profile | None] = []
        wait_for(lambda: found.append(requests.take()) or found[-1] is not None, 30)  # type: ignore[func-returns-value]
        assert found[-1] is not None
        accept(found[-1], {"drafter-0": 10})

    thread = threading.Thread(target=run)
    thread.start()
    console = Console(record=True, quiet=False, file=Path("/dev/null").open("w"), width=120)  # noqa: SIM115
    assert profile(live.root, 1, console) == 1
    thread.join()
    assert "drafter-0: no trace, its process ended before it was done" in console.export_text()


def test_a_loop_in_one_process_is_asked_by_a_thread(live: RunFolder) -> None:
    said: list[str] = []
    profiler = Profiler("main", "target and drafter", "steps", "cpu", nobody)
    with listening(live, profiler, said.append):
        codes: list[int] = []
        asking = threading.Thread(target=lambda: codes.append(profile(live.root, 3, Console(quiet=True))))
        asking.start()
        for number in range(10**6):
            work(profiler, iter([number]), parts=2)
            time.sleep(0.001)
            if not asking.is_alive():
                break
        asking.join()
    assert codes == [0]
    (folder,) = (live.root / FOLDER).iterdir()
    assert {path.name for path in folder.iterdir()} == {"main.json.gz", "main.result.json", WORKERS, "summary.json"}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["workers"][0]["count"] == 3
    products = next(f for f in summary["summaries"]["main"]["families"] if f["name"] == "matrix products")
    assert products["count"] == 2 * 3
    assert len(said) == 1


# --- real runs --------------------------------------------------------------------------------------------------------

STEPS = 24  # the command needs some of them to get there
FEW = (f"train.max_steps={STEPS}", "train.save_every=1000")


@pytest.fixture(scope="module")
def mill(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, prepared: Path) -> Iterator[Mill]:
    with Mill.opened(tmp_path_factory.mktemp("profile"), tiny_target, prepared) as mill:
        yield mill


def profiled(run: Run) -> tuple[dict[str, Any], str]:
    """The run is profiled while it trains, and goes on to its end."""
    run.await_rows(1)
    done = subprocess.run(
        [sys.executable, "-m", "draftmill", "profile", str(run.folder), "--steps", "2"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.end() == 0, run.said
    (folder,) = (run.folder / FOLDER).iterdir()
    return json.loads((folder / "summary.json").read_text()), done.stdout


def families(summary: dict[str, Any], worker: str) -> set[str]:
    return {family["name"] for family in summary["summaries"][worker]["families"]}


def counted(summary: dict[str, Any]) -> set[tuple[str, str, int, str]]:
    return {(one["worker"], one["role"], one["count"], one["unit"]) for one in summary["workers"]}


def test_profiled_runs_name_their_work_and_are_not_changed_by_it(mill: Mill) -> None:
    plain, alone = mill.start("plain", *FEW), mill.start("alone", *FEW)
    summary, text = profiled(alone)
    assert counted(summary) == {("main", "target and drafter", 2, "steps")}
    assert families(summary, "main") >= {"matrix products", "attention", "loss", "optimizer"}
    assert "2 steps in" in text
    both = mill.start("split", *FEW, *split(1, 1))
    summary, _ = profiled(both)
    assert counted(summary) == {("drafter-0", "drafter", 2, "steps"), ("target-0", "target", 2, "batches")}
    assert "optimizer" in families(summary, "drafter-0")
    assert not {"optimizer", "loss"} & families(summary, "target-0")
    assert plain.end() == 0
    for run in (alone, both):
        assert rows(run) == rows(plain)
        assert weights(run, STEPS).read_bytes() == weights(plain, STEPS).read_bytes()
        assert_each_batch_once(run, STEPS * 2)


@pytest.mark.long
def test_an_inline_rank_records_both_sides(mill: Mill) -> None:
    summary, _ = profiled(mill.start("inline", *FEW, "devices.inline=cpu*2"))
    assert counted(summary) == {("drafter-0", "target and drafter", 2, "steps")}
    assert families(summary, "drafter-0") >= {"matrix products", "loss", "collectives"}
