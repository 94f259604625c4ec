"""`draftmill doctor`: each check in a right and a wrong state, and the same words as `train` where that refuses."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_helpers import Cli
from safetensors.torch import load_file, save_file

from draftmill.config import RunConfig, load_run_config
from draftmill.data.plan import BatchPlan
from draftmill.data.tokenizer import load_tokenizer
from draftmill.drafter.memory import estimate
from draftmill.drafter.model import Drafter
from draftmill.errors import UserError
from draftmill.run import build, doctor_checks, doctor_room, doctor_target, pipeline
from draftmill.run import doctor as machine
from draftmill.run.build import Built
from draftmill.run.doctor import Finding, doctor, examine_config
from draftmill.run.doctor_checks import Parts, settle_parts, without_measuring
from draftmill.run.doctor_room import Room, disk_space
from draftmill.run.doctor_target import look_at_cache, recurrent_layers, weights
from draftmill.run.files import RunFolder
from draftmill.run.placement import Placement
from draftmill.run.train import train

SPLIT, INLINE = Placement(("cuda:0",), ("cuda:1",)), Placement((), ("cuda:0",))
PARAMETERS = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48 + 2 * 32 + 2 * 8 + 2 * 32 * 32 + 2 * 32  # 1 layer, 2 taps
BATCH = 192 * 2 * 32 * 2  # bytes: tokens × taps × hidden size × bfloat16
HEAD = 49153 * 32 * 2
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module", autouse=True)
def _tokenizers_are_read_once() -> Iterator[None]:
    """They are what takes longest here."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (build, doctor_checks):
            patch.setattr(module, "load_tokenizer", functools.cache(load_tokenizer))
        yield


def levels(findings: Iterable[Finding]) -> dict[str, str]:
    return {finding.name: finding.level for finding in findings}


def named(findings: Iterable[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def has_module(monkeypatch: pytest.MonkeyPatch, **there: bool) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *_: (object() if there[name] else None) if name in there else real(name),
    )


# --- software ---------------------------------------------------------------------------------------------------------


def test_declared_packages_are_those_of_the_project() -> None:
    declared = dict(machine.declared())
    assert declared["torch"] == "2.11"
    assert "pytest" not in declared
    assert levels(machine.required_packages()) == {"packages": "ok"}


def test_missing_and_old_packages_are_named_with_their_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.10.1+cu128", "transformers": "5.15", "zstandard": None, "pyarrow": None}
    monkeypatch.setattr(machine, "installed", lambda name: versions.get(name, "99.0"))
    findings = list(machine.required_packages())
    assert levels(findings) == {
        "torch": "error", "zstandard": "warning", "pyarrow": "error", "packages": "ok"
    }  # fmt: skip
    assert named(findings, "torch").found == "torch 2.10.1+cu128, older than 2.11"
    assert ".jsonl.zst" in named(findings, "zstandard").consequence
    assert named(findings, "pyarrow").remedy == "pip install 'pyarrow>=17'"
    assert "transformers 5.15" in named(findings, "packages").found
    versions["draftmill"] = None
    assert levels(machine.required_packages()) == {"packages": "warning"}
    del versions["draftmill"]
    assert [f.name for f in machine.examine(Path("nowhere.yaml"), [])][-1] == "packages", (
        "no check needs what is missing"
    )


def test_a_torch_that_cannot_use_the_gpus_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "version")
    assert machine.torch_build("2.13.0+cpu", None, gpus=0).level == "ok"
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan 14\n")
    assert machine.torch_build("2.13.0", "13.0", gpus=2).level == "ok"
    cpu = machine.torch_build("2.13.0+cpu", None, gpus=0)
    assert (cpu.level, "570.86.15" in cpu.found, "built for CPUs" in cpu.consequence) == ("warning", True, True)
    assert "newer driver for CUDA 13.0" in machine.torch_build("2.13.0", "13.0", gpus=0).consequence


def test_optional_packages_say_what_their_lack_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    has_module(monkeypatch, triton=False, fla=False, gguf=True)
    assert levels(machine.optional_packages(gpus=0)) == {"triton": "ok", "flash-linear-attention": "ok", "gguf": "ok"}
    findings = list(machine.optional_packages(gpus=1))
    assert named(findings, "triton").level == "warning"
    assert "several times slower" in named(findings, "triton").consequence
    assert "gated delta net" in named(findings, "flash-linear-attention").consequence
    has_module(monkeypatch, triton=True)
    assert named(machine.optional_packages(gpus=1), "triton").level == "ok"


# --- GPUs and host ----------------------------------------------------------------------------------------------------


def with_gpus(
    monkeypatch: pytest.MonkeyPatch, *, free: float = 79.0, capability: tuple[int, int] = (9, 0), reach: bool = True
) -> None:
    properties = SimpleNamespace(name="Big GPU", major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free * 1e9), int(80e9)))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, two: reach or (one, two) == (0, 1))


def test_gpus_are_listed_and_what_is_wrong_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(machine.gpus(0)) == {"none": "ok"}
    with_gpus(monkeypatch)
    findings = list(machine.gpus(2))
    assert levels(findings) == {"driver": "ok", "cuda:0": "ok", "cuda:1": "ok", "peer access": "ok"}
    assert named(findings, "cuda:1").found == "Big GPU, 80.0 GB, 79.0 GB free, compute capability 9.0"
    with_gpus(monkeypatch, free=50.0)
    assert "hold 30.0 GB" in named(machine.gpus(2), "cuda:0").consequence
    with_gpus(monkeypatch, capability=(7, 5))
    assert "bfloat16" in named(machine.gpus(2), "cuda:0").consequence
    with_gpus(monkeypatch, reach=False)
    peers = named(machine.gpus(2), "peer access")
    assert (peers.level, peers.found) == ("warning", "not between 1→0")


def test_a_gpu_that_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch)

    def refuse(_: int) -> None:
        raise RuntimeError("CUDA error: all devices are busy\nmore")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    finding = named(machine.gpus(2), "cuda:0")
    assert (finding.level, finding.found) == ("error", "cannot be used (CUDA error: all devices are busy)")


def refuse_files(*_: object, **__: object) -> None:
    raise OSError(30, "Read-only file system")


def test_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    findings = list(machine.host())
    assert levels(findings) == {"memory": "ok", "shared memory": "ok", "CPU cores": "ok", "TMPDIR": "ok"}
    assert named(findings, "TMPDIR").found == f"{tmp_path} can be written"
    assert f"of {os.cpu_count()}" in named(findings, "CPU cores").found
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert machine.temporary_files().level == "warning"
    monkeypatch.setattr(os, "memfd_create", refuse_files)
    assert machine.shared_memory().level == "error"


def test_what_triton_needs_to_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    monkeypatch.setenv("CC", "mycc")
    assert levels(machine.triton_compiler()) == {"Triton's cache": "ok", "C compiler": "ok"}
    assert not (tmp_path / "deep").exists()
    (tmp_path / "Python.h").unlink()
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse_files)
    cache, compiler = machine.triton_compiler()
    assert (cache.level, cache.found) == ("error", f"{tmp_path} cannot be written (Read-only file system)")
    assert compiler.found == f"a C compiler and {tmp_path / 'Python.h'} is missing"


def test_a_file_in_the_way_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert machine.not_writable(tmp_path / "new" / "deeper") is None
    assert "Not a directory" in str(machine.not_writable(tmp_path / "file" / "run"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- a whole config ---------------------------------------------------------------------------------------------------


def test_a_sound_config_leaves_nothing_behind_and_exits_with_0(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(cli.folder.rglob("*"))
    assert doctor(cli.config, [f"cache={cli.folder / 'states'}", "devices=cpu"]) == 0
    shown = capsys.readouterr().out
    assert sorted(cli.folder.rglob("*")) == before
    assert shown.splitlines()[-1].startswith("0 errors, ")
    groups = ["software", "GPUs", "this machine", "config", "data", "drafter", "target", "memory", "disk", "run folder"]
    assert [line for line in shown.splitlines() if line in [*groups, "errors"]] == groups
    assert "✗" not in shown
    for words in ("49152: unused embedding row", "layers [1, 3] of the target's 6", "24 steps, batches in each: 1"):
        assert words in " ".join(shown.split())


def test_json_is_a_list_of_findings(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(cli.config, ["drafter.taps=[1, 9]", "devices=cpu"], as_json=True) == 2
    findings = json.loads(capsys.readouterr().out)
    assert {frozenset(finding) for finding in findings} == {
        frozenset(("group", "name", "level", "found", "consequence", "remedy"))
    }
    (error,) = [finding for finding in findings if finding["level"] == "error"]
    assert error["found"] == "drafter.taps: [1, 9], but the target's layers are 0 … 5"


def test_all_errors_are_named_at_once_and_last(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["drafter.mask_token_id=2", "drafter.head_dim=7", "devices.inline=cpu*2"]
    assert doctor(cli.config, wrong) == 2
    before, _, errors = capsys.readouterr().out.partition("\nerrors\n")
    assert "✗" not in before
    words = " ".join(errors.split())
    for part in ("2 is the tokenizer's eos token", "7 is odd", "evenly by 2 drafter ranks", "3 errors, "):
        assert part in words


def test_a_config_that_cannot_be_read_is_an_error(cli: Cli) -> None:
    for arguments in ((cli.folder / "nowhere.yaml", []), (cli.config, ["train.rate=1"])):
        (finding,) = examine_config(*arguments)
        assert finding.level == "error"
        with pytest.raises(UserError) as caught:
            load_run_config(*arguments)
        assert finding.found == str(caught.value)


def other_template(cli: Cli, tiny_target: Path) -> list[str]:
    shutil.copytree(tiny_target, cli.folder / "other")
    (cli.folder / "other" / "chat_template.jinja").write_text("{{ messages }}")
    return [f"target.model={cli.folder / 'other'}", "devices=cpu"]


def no_spare_row(cli: Cli, tiny_target: Path) -> list[str]:
    shutil.copytree(tiny_target, cli.folder / "full")
    path = cli.folder / "full" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 49152}))
    return [f"target.model={cli.folder / 'full'}", "devices=cpu"]


@pytest.mark.parametrize(
    "wrong",
    [
        other_template,
        no_spare_row,
        lambda *_: ["data.token_budget=16", "train.anchors=1", "devices=cpu"],
        lambda *_: ["data.prepared=nowhere", "devices=cpu"],
        lambda *_: ["devices.targets=cpu", "devices.drafters=cpu*2"],
        lambda *_: ["devices.targets=cpu", "devices.drafters=cpu", "handoff.slots=9"],
        lambda *_: ["parallel=fsdp", "devices=cpu"],
        lambda *_: ["devices.targets=cpu", "devices.drafters=cpu", "handoff.queue=device"],
    ],
    ids=["template", "mask", "budget", "data", "ranks", "slots", "fsdp", "queue"],
)
def test_what_train_refuses_doctor_refuses_in_the_same_words(
    wrong: Callable[[Cli, Path], list[str]], cli: Cli, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (doctor_room, pipeline):  # the same at both times
        monkeypatch.setattr(module, "available_memory", lambda: (1 << 30) + 8 * BATCH)
    overrides = wrong(cli, tiny_target)
    errors = [finding for finding in examine_config(cli.config, overrides) if finding.level == "error"]
    with pytest.raises(UserError) as caught:
        train(load_run_config(cli.config, overrides), resume=False)
    assert [error.found for error in errors] == [str(caught.value)]
    assert errors[0].consequence == "`draftmill train` refuses this"


# --- data, drafter, devices -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def settled(tiny_target: Path, prepared: Path) -> tuple[RunConfig, Parts]:
    values = {
        "run_dir": "nowhere/run", "threads": 1, "devices": "cpu",
        "data": {"prepared": str(prepared), "token_budget": 192}, "target": {"model": str(tiny_target)},
        "drafter": {"layers": 1, "block_size": 4}, "train": {"epochs": 100, "max_steps": 24, "anchors": 24},
    }  # fmt: skip
    config = RunConfig.model_validate(values)
    parts = settle_parts(config)
    assert parts.built is not None
    return config, parts


@pytest.fixture
def built(settled: tuple[RunConfig, Parts]) -> Built:
    assert settled[1].built is not None
    return settled[1].built


def changed(config: RunConfig, **sections: Any) -> RunConfig:
    values = config.model_dump()
    for name, value in sections.items():
        values[name] = {**values[name], **value} if isinstance(value, dict) else value
    return RunConfig.model_validate(values)


def test_trained_tokens() -> None:
    found = [doctor_checks.trained_tokens(trained, 1000).level for trained in (0, 49, 50, 1000)]
    assert found == ["error", "warning", "ok", "ok"]


def test_dropped_rows(built: Built) -> None:
    assert doctor_checks.rows(built.prepared).level == "ok"
    info = replace(built.prepared.info, rows=100, kept_rows=90, dropped={"no_user": 3, "not_json": 7})
    finding = doctor_checks.rows(SimpleNamespace(info=info, folder=Path("set")))  # type: ignore[arg-type]
    assert (finding.level, finding.found) == ("warning", "10 of 100 dropped by prepare")
    assert finding.consequence.endswith("7 not_json, 3 no_user")


def test_cut_and_left_out_documents_and_padding(built: Built) -> None:
    assert doctor_checks.documents(built.plan).level == "ok"
    lengths = built.prepared.lengths
    budget = int(lengths.max()) - 3
    small = BatchPlan(built.prepared, budget, 0)
    cut = int((lengths > budget).sum())
    finding = doctor_checks.documents(small)
    assert f"{cut} of 60 cut to {budget} tokens ({cut / 60:.1%}), 0 left out" in finding.found
    assert finding.level == ("warning" if cut > 3 else "ok")
    assert doctor_checks.documents(BatchPlan(built.prepared, int(lengths.min()) + 5, 0)).level == "warning"
    tokens = int(lengths.sum())
    for plan in (built.plan, BatchPlan(built.prepared, 16384, 0)):
        share = 1 - tokens / (plan.batches_per_epoch * plan.token_budget)
        finding = doctor_checks.batches(plan)
        assert f"{share:.1%} padding" in finding.found
        assert finding.level == ("warning" if share > 0.1 else "ok")
    assert doctor_checks.batches(BatchPlan(built.prepared, 16384, 0)).level == "warning"


def test_schedule(settled: tuple[RunConfig, Parts], built: Built) -> None:
    config, _ = settled
    batches = built.plan.batches_per_epoch
    (finding,) = doctor_checks.schedule(config, built)
    assert (finding.level, f"{24 / batches:.3g} passes" in finding.found) == ("ok", True)
    few = changed(config, train={"epochs": 1, "accumulation": batches + 1})
    finding = named(doctor_checks.schedule(few, replace(built, total_steps=1)), "schedule")
    assert (finding.level, f"train.accumulation={batches}" in finding.remedy) == ("warning", True)
    short = replace(built, spec=replace(built.spec, max_position_embeddings=30))
    assert levels(doctor_checks.schedule(config, short)) == {"schedule": "ok", "positions": "warning"}


def test_kernels_and_threads(settled: tuple[RunConfig, Parts], built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = settled
    fit, unfit = replace(built.spec, head_dim=64), built.spec
    assert doctor_checks.kernels(config, fit, "cuda:0").found == "fused step"
    finding = doctor_checks.kernels(config, unfit, "cuda:0")
    assert (finding.level, "heads have 8 numbers" in finding.found) == ("warning", True)
    assert doctor_checks.kernels(config, unfit, "cpu").level == "ok"
    assert doctor_checks.kernels(changed(config, train={"kernels": "plain"}), unfit, "cuda:0").level == "ok"
    monkeypatch.setattr(doctor_checks, "available_cpus", lambda: 8)
    two = Placement(("cpu",), ("cpu",))
    assert doctor_checks.devices(changed(config, threads=4), two, auto=False).level == "ok"
    finding = doctor_checks.devices(changed(config, threads=5), two, auto=False)
    assert (finding.level, finding.remedy) == ("warning", "set threads=4")
    finding = doctor_checks.devices(changed(config, threads=1), Placement((), ("cpu",) * 9), auto=False)
    assert (finding.level, finding.remedy) == ("warning", "use fewer processes, or more cores")


def test_auto_on_several_gpus_measures_nothing(
    settled: tuple[RunConfig, Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(settled[0], devices="auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for accumulation, ranks in ((1, 1), (4, 4), (6, 3), (7, 1)):
        inline, auto = without_measuring(changed(config, train={"accumulation": accumulation}))
        assert (len(inline.devices.inline or ()), auto) == (ranks, True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert without_measuring(config) == (config, False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert without_measuring(changed(config, devices="cpu"))[1] is False
    parts = settle_parts(changed(config, train={"kernels": "plain"}))
    assert (parts.auto, parts.refusals, parts.placement) == (True, [], Placement((), ("cuda:0",)))


# --- target -----------------------------------------------------------------------------------------------------------


def with_target(config: RunConfig, folder: Path) -> RunConfig:
    return changed(config, target={"model": str(folder)})


def test_weights_are_counted_without_loading_them(settled: tuple[RunConfig, Parts], tiny_target: Path) -> None:
    config, parts = settled
    numbers = sum(tensor.numel() for tensor in load_file(tiny_target / "model.safetensors").values())
    finding, size = weights(config, parts.target, needed=True)
    assert (finding.level, size) == ("ok", 2 * numbers)
    assert weights(changed(config, target={"dtype": "float32"}), parts.target, needed=True)[1] == 4 * numbers


def test_weights_that_lack_or_are_cut_short(settled: tuple[RunConfig, Parts], tmp_path: Path) -> None:
    config, parts = settled
    here = with_target(config, tmp_path)
    finding, size = weights(here, parts.target, needed=True)
    assert (finding.level, size, "holds no model.safetensors" in finding.found) == ("error", None, True)
    assert weights(here, parts.target, needed=False)[0].level == "warning"
    save_file({"a": torch.zeros(7, 3)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    finding, _ = weights(here, parts.target, needed=True)
    assert (finding.level, "lacks two.safetensors" in finding.found) == ("error", True)
    save_file({"b": torch.zeros(5)}, tmp_path / "two.safetensors")
    assert weights(here, parts.target, needed=True)[1] == 2 * 26
    whole = (tmp_path / "two.safetensors").read_bytes()
    (tmp_path / "two.safetensors").write_bytes(whole[:-1])
    finding, _ = weights(here, parts.target, needed=True)
    assert (finding.level, "two.safetensors is damaged or cut short" in finding.found) == ("error", True)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 100)
    assert weights(here, parts.target, needed=True)[1] == 100


def test_a_hub_id_that_was_not_fetched_is_a_warning(settled: tuple[RunConfig, Parts], tmp_path: Path) -> None:
    config, parts = settled
    finding, size = weights(changed(config, target={"model": "nobody/nothing-draftmill"}), parts.target, needed=True)
    assert (finding.level, size) == ("warning", None)
    assert "`train` fetches it" in finding.consequence


def test_layers_with_a_state(settled: tuple[RunConfig, Parts], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3_5TextConfig

    config, parts = settled
    assert list(recurrent_layers(config, parts)) == []
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"]
    hybrid = Parts(
        built=parts.built, spec=parts.spec, placement=INLINE,
        target=Qwen3_5TextConfig(num_hidden_layers=5, layer_types=kinds),
    )  # fmt: skip
    has_module(monkeypatch, fla=False, causal_conv1d=True)
    findings = list(recurrent_layers(config, hybrid))
    assert levels(findings) == {"isolation": "ok", "flash-linear-attention": "warning", "causal-conv1d": "ok"}
    assert findings[0].found.startswith("2 of the 4 layers that are run")  # the last tap is layer 3
    has_module(monkeypatch, fla=True)
    assert named(recurrent_layers(config, hybrid), "flash-linear-attention").level == "ok"
    packed = changed(config, target={"isolation": "packed"})
    assert named(recurrent_layers(packed, hybrid), "isolation").level == "error"
    hybrid.placement = Placement((), ("cpu",))
    assert levels(recurrent_layers(config, hybrid)) == {"isolation": "ok"}, "the libraries are for GPUs"


def test_cache(settled: tuple[RunConfig, Parts], built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, parts = settled
    assert look_at_cache(config, parts).findings == []
    cached = changed(config, cache=tmp_path / "states")
    bins = built.plan.batches_per_epoch
    cache = look_at_cache(cached, parts)
    assert (levels(cache.findings), cache.missing_bytes, cache.complete) == (
        {"cache": "ok"},
        bins * BATCH + HEAD,
        False,
    )
    assert not (tmp_path / "states").exists()
    cache = look_at_cache(changed(cached, cache_gb=2.5 * BATCH / 1e9), parts)
    assert cache.missing_bytes == 2 * BATCH + HEAD
    assert look_at_cache(changed(cached, cache_gb=0.5 * BATCH / 1e9), parts).findings[0].level == "warning"
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "mine.txt").touch()
    (finding,) = look_at_cache(cached, parts).findings
    assert (finding.level, "holds mine.txt" in finding.found) == ("error", True)
    (tmp_path / "states" / "mine.txt").unlink()
    (tmp_path / "states" / "bin-00000000.safetensors").touch()
    assert "cache.json is missing" in look_at_cache(cached, parts).findings[0].found
    monkeypatch.setattr(doctor_target, "not_writable", lambda folder: f"{folder} cannot be written (why)")
    assert look_at_cache(cached, parts).findings[0].level == "error"


# --- memory and disk --------------------------------------------------------------------------------------------------


def room(settled: tuple[RunConfig, Parts], placement: Placement, **sections: Any) -> Room:
    """Of a target of 1 MB beside its embedding, with heads that the fused step takes."""
    config, parts = settled
    assert parts.built is not None
    spec = replace(parts.built.spec, head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    built = replace(parts.built, placement=placement, spec=spec, slots=3)
    return Room(changed(config, **sections), built, HEAD + 1_000_000, True)


def test_sizes_are_those_of_the_tiny_run(built: Built) -> None:
    assert sum(p.numel() for p in Drafter(built.spec).parameters()) == PARAMETERS
    assert built.width == 64


def fused_total(run: Room, groups: int) -> int:
    return estimate(run.built.spec, context_rows=192, anchors=24, groups=groups, tied=True).total


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "split"])
def test_the_drafters_gpu(settled: tuple[RunConfig, Parts], inline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_room, "reachable", lambda *_: False)
    run = room(settled, INLINE if inline else SPLIT)
    beside = 1_000_000 + BATCH if inline else 2 * BATCH
    device = "cuda:0" if inline else "cuda:1"

    def finding(groups: int, more: int) -> Finding:
        (only,) = run.on_gpu(device, int(fused_total(run, groups) / 0.9) + beside + more)
        return only

    assert finding(1, 2).level == finding(2, 2).level == "ok"
    assert "groups" not in finding(1, 2).found
    assert "in 2 groups of blocks" in finding(1, -2).found
    assert "in 16 groups" in finding(16, 2).found
    too_little = finding(16, -2)
    assert too_little.level == "error"
    assert "the step needs at least" in too_little.found


def test_slots_in_the_drafters_gpu_are_counted_and_refused(
    settled: tuple[RunConfig, Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_room, "reachable", lambda *_: True)
    run = room(settled, SPLIT)
    assert run.beside("cuda:1")["slots"] == 3 * BATCH
    assert levels(run.queue(0)) == {"queue": "ok"}, "nothing in host memory"
    assert [f.level for f in run.on_gpu("cuda:1", 10**10)] == ["ok"]
    findings = list(run.on_gpu("cuda:1", (1 << 30) + 2 * BATCH + 4 * (PARAMETERS + 10**6)))
    assert [f.level for f in findings] == ["ok"]
    refused = list(run.on_gpu("cuda:1", (1 << 30) + 2 * BATCH))
    assert refused[0].level == "error"
    assert refused[0].found.startswith("handoff.slots: 3 slots")


def test_the_targets_gpu_and_the_plain_step(settled: tuple[RunConfig, Parts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_room, "reachable", lambda *_: False)
    run = room(settled, SPLIT)
    needed = HEAD + 1_000_000 + 2 * BATCH
    assert [next(run.on_gpu("cuda:0", needed + more)).level for more in (0, -1)] == ["ok", "error"]
    plain = room(settled, INLINE, train={"kernels": "plain"})
    masters = 16 * sum(p.numel() for p in Drafter(plain.built.spec).parameters())
    needed = masters + HEAD + 1_000_000 + BATCH
    assert [next(plain.on_gpu("cuda:0", needed + more)).level for more in (0, -1)] == ["ok", "error"]


def test_reused_states_come_on_top(settled: tuple[RunConfig, Parts], monkeypatch: pytest.MonkeyPatch) -> None:
    run = room(settled, INLINE, target={"reuse_states_gb": 1.0})
    epoch = run.built.plan.batches_per_epoch * BATCH
    assert run.reused == epoch
    assert room(settled, INLINE, target={"reuse_states_gb": 1e-4}).reused == 100_000
    monkeypatch.setattr(Room, "reused", 10**9)
    needed = fused_total(run, 1) + 1_000_000 + BATCH + 10**9
    assert [next(run.on_gpu("cuda:0", needed + more)).level for more in (0, -1)] == ["ok", "warning"]


def test_auto_may_give_target_and_drafter_different_gpus(settled: tuple[RunConfig, Parts]) -> None:
    run = replace(room(settled, INLINE), target_bytes=HEAD + 10**9)
    (together,) = run.on_gpu("cuda:0", 10**9)
    (either,) = run.on_gpu("cuda:0", 10**9 + HEAD, auto=True)
    (alone,) = run.on_gpu("cuda:0", 10**9, auto=True)
    assert [f.level for f in (together, either, alone)] == ["error", "ok", "error"]
    assert "different GPUs" in either.found


def test_host_memory(settled: tuple[RunConfig, Parts]) -> None:
    run = room(settled, Placement(("cpu", "cpu"), ("cpu",)))
    drafter = 16 * sum(p.numel() for p in Drafter(run.built.spec).parameters())
    stays = drafter + 3 * BATCH + HEAD
    total = stays + 2 * (HEAD + 1_000_000)
    assert [run.host(free).level for free in (total, total - 1, stays, stays - 1)] == [
        "ok", "warning", "warning", "error"
    ]  # fmt: skip
    assert f"at least {total / 1e9:.2f} GB" in run.host(total).found
    assert "size is unknown" in replace(run, target_bytes=None).host(total).found


def test_the_queue_in_host_memory(settled: tuple[RunConfig, Parts]) -> None:
    run = room(settled, Placement(("cpu",), ("cpu",)))
    kept = 1 << 30
    assert [next(run.queue(kept + 3 * BATCH + more)).level for more in (0, -1)] == ["ok", "error"]
    assert list(room(settled, INLINE).queue(0)) == []


def test_disk_space(
    settled: tuple[RunConfig, Parts], built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(settled[0], run_dir=tmp_path / "run", cache=tmp_path / "states", train={"save_every": 5})
    free = [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free[0]))

    def level(size: int, settings: RunConfig) -> str:
        free[0] = size
        (finding,) = disk_space(settings, built, 1000)
        assert finding.name == "checkpoint and cache"
        return finding.level

    three, two = 3 * 12 * PARAMETERS, 2 * 12 * PARAMETERS  # keep + 1; 24 steps have two saves of every 20
    assert [level(size, config) for size in (three + 1000, three + 999)] == ["ok", "error"]
    rarely = changed(config, train={"save_every": 20})
    assert [level(size, rarely) for size in (two + 1000, two + 999)] == ["ok", "error"]
    muon = changed(config, train={"optimizer": "muon"})
    norms = 2 * 32 + 2 * 8 + 2 * 32  # AdamW's, with a second moment
    less = 3 * (8 * PARAMETERS + 4 * norms)
    assert [level(size, muon) for size in (less + 1000, less + 999)] == ["ok", "error"]
    step = tmp_path / "run" / "checkpoints" / "step-00000005"
    step.mkdir(parents=True)
    (step / "drafter.safetensors").write_bytes(b"x" * 500)
    assert [level(size, config) for size in (three + 500, three + 499)] == ["ok", "error"]


# --- run folder -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(settled: tuple[RunConfig, Parts], tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of two steps, with all its states on disk."""
    folder = tmp_path_factory.mktemp("runs")
    config = changed(
        settled[0], run_dir=folder / "run", cache=folder / "states", decode_check_prompts=0, train={"max_steps": 2}
    )  # fmt: skip
    assert train(config, resume=False) == 0
    return config


def refused(config: RunConfig, *, resume: bool) -> str:
    with pytest.raises(UserError) as caught:
        train(config, resume=resume)
    return str(caught.value)


def test_a_run_folder_that_holds_a_run(trained: RunConfig, settled: tuple[RunConfig, Parts], tmp_path: Path) -> None:
    built = settled[1].built
    assert doctor_checks.run_folder(changed(trained, run_dir=tmp_path / "new"), built).level == "ok"
    held = doctor_checks.run_folder(changed(trained, train={"lr": 0.1}), built)
    assert (held.level, held.found) == (
        "warning", f"{trained.run_dir} holds a run at step 2; changed since it began: train.lr 0.0006 → 0.1",
    )  # fmt: skip
    assert "--resume" in held.remedy
    assert "add --resume" in refused(trained, resume=False)
    other = changed(trained, drafter={"block_size": 8})
    finding = doctor_checks.run_folder(other, settle_parts(other).built)
    assert finding.level == "error"
    assert finding.found.endswith(refused(other, resume=True))
    (tmp_path / "file").touch()
    assert doctor_checks.run_folder(changed(trained, run_dir=tmp_path / "file"), built).level == "error"
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "metrics.jsonl").touch()
    assert "without a checkpoint" in doctor_checks.run_folder(changed(trained, run_dir=tmp_path / "half"), built).found


def test_a_run_that_is_still_going(trained: RunConfig) -> None:
    with RunFolder(trained.run_dir).locked():
        finding = doctor_checks.run_folder(trained, None)
    assert (finding.level, "still going" in finding.found) == ("error", True)


def test_a_complete_cache_needs_no_target(trained: RunConfig, settled: tuple[RunConfig, Parts]) -> None:
    parts = settled[1]
    bins = parts.built.plan.batches_per_epoch if parts.built else 0
    cache = look_at_cache(trained, parts)
    assert (levels(cache.findings), cache.missing_bytes) == ({"cache": "ok"}, (bins - 2) * BATCH)
    assert not cache.complete, "24 steps need more than the two that were trained"
    assert parts.built is not None
    two = Parts(built=replace(parts.built, total_steps=2), target=parts.target)
    assert look_at_cache(trained, two).complete
    other = changed(trained, seed=1)
    (finding,) = look_at_cache(other, two).findings
    assert finding.level == "error"
    assert finding.found == refused(changed(other, run_dir=trained.run_dir.with_name("other")), resume=False)


def test_the_printed_text_keeps_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    for part in machine.rendered([Finding("g", "n", "warning", "devices.targets=[0,1]", "[bold]", "x")]):
        Console(width=60).print(part)
    shown = capsys.readouterr().out
    assert "devices.targets=[0,1]" in shown
    assert "[bold]" in shown
    assert "0 errors, 1 warning: nothing stands in the way" in shown
