"""`draftmill doctor`: speed of the target's layers here, network, packages of tracking; the part that `train` says."""

from __future__ import annotations

import importlib.util
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from run_helpers import Cli

from draftmill.config import RunConfig, TrackingConfig, load_run_config
from draftmill.run import doctor_speed
from draftmill.run.build import Built, build
from draftmill.run.doctor import Finding, examine_config
from draftmill.run.doctor_checks import Parts
from draftmill.run.doctor_ports import network, ranks_meet, tracking
from draftmill.run.doctor_speed import first_layers, judge, layer_speed, time_layers
from draftmill.run.doctor_start import cheap_findings, heed
from draftmill.run.placement import Placement
from draftmill.target.shape import load_config

ALONE = Placement((), ("cpu",))


@pytest.fixture
def config(cli: Cli) -> RunConfig:
    return load_run_config(cli.config, [])


def hybrid(layers: int = 6, **more: Any) -> Any:
    """A text model whose every fourth layer is attention and whose others carry a state."""
    return transformers.Qwen3NextConfig(
        vocab_size=500, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, num_experts=0, mlp_only_layers=list(range(layers)), pad_token_id=499, **more,
    )  # fmt: skip


# --- the target's layers ----------------------------------------------------------------------------------------------


def test_the_first_layer_of_each_kind_is_made_and_timed(config: RunConfig) -> None:
    target = hybrid()
    kinds = list(target.layer_types)
    assert kinds.index("full_attention") == 3
    model = first_layers(config, target, kinds, "cpu")
    assert len(model.get_decoder().layers) == 4
    assert next(model.parameters()).dtype == torch.bfloat16
    assert target.num_hidden_layers == 6, "the run's own config is left alone"
    seconds = time_layers(config, target, kinds, "cpu", 32)
    assert seconds is not None
    assert seconds.keys() == {"linear_attention", "full_attention"}
    assert all(0 < value < 30 for value in seconds.values())


def test_large_layers_are_not_made_for_a_cpu(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_speed, "CPU_PARAMETERS", 100)
    assert time_layers(config, hybrid(), ["linear_attention"], "cpu", 32) is None


def test_slow_layers_are_a_warning_on_a_gpu() -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    fast = judge(kinds, {"linear_attention": 0.003, "full_attention": 0.002}, "cuda:0", 4096, 16384)
    assert fast.level == "ok"
    assert "linear_attention 3.00 ms, full_attention 2.00 ms for 4,096 tokens; about 0.044 s for a batch" in fast.found
    slow = judge(kinds, {"linear_attention": 0.0041, "full_attention": 0.002}, "cuda:0", 4096, 16384)
    assert (slow.level, "flash-linear-attention" in slow.remedy) == ("warning", True)
    assert judge(kinds, {"linear_attention": 9.0, "full_attention": 0.002}, "cpu", 128, 128).level == "ok"
    assert judge(["full_attention"], {"full_attention": 9.0}, "cuda:0", 128, 128).level == "ok"


def test_a_model_that_cannot_be_run_is_a_warning_and_no_end(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel image\nmore")

    built = build(config)
    parts = Parts([], built, ALONE, built.prepared, built.plan, built.spec, load_config(config.target.model))
    (found,) = layer_speed(config, parts)
    assert (found.level, "full_attention" in found.found) == ("ok", True)
    monkeypatch.setattr(doctor_speed, "time_layers", broken)
    (found,) = layer_speed(config, parts)
    assert (found.level, "RuntimeError: no kernel image" in found.found) == ("warning", True)
    assert list(layer_speed(config, replace(parts, target=None))) == []


# --- network ----------------------------------------------------------------------------------------------------------


def test_several_ranks_need_the_loopback(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert list(network(config, ALONE)) == []
    (found,) = network(config, Placement((), ("cpu", "cpu")))
    assert (found.level, found.name) == ("ok", "ranks")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wire7")
    assert (ranks_meet().level, "wire7" in ranks_meet().found) == ("error", True)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")

    def unreachable(*_: object, **__: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", unreachable)
    assert ranks_meet().level == "error"


def packages(monkeypatch: pytest.MonkeyPatch, *there: str) -> None:
    real = importlib.util.find_spec
    names = ("wandb", "prometheus_client")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: (name in there or None) if name in names else real(name)
    )


def test_a_port_that_is_taken_and_packages_that_lack_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def findings(**keys: Any) -> dict[str, Finding]:
        return {finding.name: finding for finding in tracking(TrackingConfig.model_validate(keys))}

    assert findings() == {}
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        packages(monkeypatch, "prometheus_client", "wandb")
        taken = findings(prometheus_port=port, wandb={"project": "p"})
        assert (taken["Prometheus"].level, taken["wandb"].level) == ("error", "ok")
        assert str(port) in taken["Prometheus"].found
    assert findings(prometheus_port=port)["Prometheus"].level == "ok"
    packages(monkeypatch)
    lacking = findings(prometheus_port=port, wandb={"project": "p"})
    assert {finding.level for finding in lacking.values()} == {"error"}
    assert lacking["wandb"].remedy.startswith("pip install 'draftmill[wandb]'")


def test_they_are_among_the_findings_of_a_config(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch)
    names = {f.name for f in examine_config(cli.config, ["tracking.prometheus_port=9", "devices.inline=cpu*2",
                                                         "train.accumulation=2"])}  # fmt: skip
    assert {"layers", "ranks", "Prometheus"} <= names


# --- what train says --------------------------------------------------------------------------------------------------


@pytest.fixture
def built(config: RunConfig) -> Built:
    return build(config)


def test_a_sound_run_says_nothing_and_a_poor_one_what_helps(
    config: RunConfig, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    heed(config, built, said.append)
    assert said == []
    levels = {finding.name: finding.level for finding in cheap_findings(config, built)}
    assert levels.keys() >= {"trained tokens", "schedule", "devices", "weights", "host", "checkpoint"}
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    monkeypatch.setattr("draftmill.run.doctor_start.available_memory", lambda: 1)
    heed(config, built, said.append)
    assert [line.partition(":")[0] for line in said] == ["warning", "warning"]
    memory, disk = said
    assert "memory, host: at least" in memory
    assert "the system kills the run" in memory
    assert "disk, checkpoint: " in disk
    assert "lower train.keep" in disk


def test_what_train_says_touches_no_gpu(config: RunConfig, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object) -> None:
        raise AssertionError("a context on a GPU takes memory there")

    monkeypatch.setattr(torch.cuda, "mem_get_info", touched)
    monkeypatch.setattr(torch.cuda, "current_device", touched)
    on_gpus = replace(built, placement=Placement(("cuda:0",), ("cuda:1",)))
    monkeypatch.setattr("draftmill.run.doctor_room.reachable", lambda *_: False)
    assert {"host", "checkpoint"} <= {finding.name for finding in cheap_findings(config, on_gpus)}


def test_the_cheap_part_reads_no_weights(config: RunConfig, built: Built, tmp_path: Path) -> None:
    gone = config.model_copy(update={"run_dir": tmp_path / "nowhere" / "yet"})
    list(cheap_findings(gone, built))
    assert not (tmp_path / "nowhere").exists()
