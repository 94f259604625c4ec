"""Which step a GPU computes: the fused one, or the plain one with a warning that says why."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from draftmill.config import RunConfig
from draftmill.drafter.config import FULL, DrafterSpec
from draftmill.errors import UserError
from draftmill.run.build import check_kernels, identity
from draftmill.run.job import plain_because, step_settings
from draftmill.run.placement import Placement
from draftmill.run.resume import check_same_run

SPEC = DrafterSpec(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    rms_norm_eps=1e-6, rope_theta=10000.0, block_size=8, mask_token_id=511, taps=(0, 2), layer_types=(FULL,),
    layer_causal=(False,), sliding_window=None, vocab_size=512, num_target_layers=4, max_position_embeddings=1024,
)  # fmt: skip
GPU, CPU = Placement((), ("cuda:0",)), Placement((), ("cpu",))


def config(train: dict[str, Any] | None = None, **more: Any) -> RunConfig:
    values = {"run_dir": "run", "data": {"prepared": "set", "token_budget": 1024}, "target": {"model": "m"}}
    return RunConfig.model_validate({**values, "train": train or {}, **more})


def test_a_gpu_takes_the_fused_step_for_batches_of_this_length_and_a_cpu_never() -> None:
    assert step_settings(config(), SPEC, "cuda:1").fused_rows == 1024
    assert step_settings(config(), SPEC, "cpu").fused_rows is None
    assert step_settings(config({"kernels": "plain"}), SPEC, "cuda:1").fused_rows is None


@pytest.mark.parametrize(
    ("values", "spec", "reason"),
    [
        ({"train": {"dtype": "float32"}}, SPEC, r"train.dtype is float32"),
        ({}, replace(SPEC, head_dim=80), r"heads have 80 numbers"),
        ({"parallel": "fsdp"}, SPEC, r"parallel: fsdp"),
    ],
)
def test_what_has_no_fused_step_is_said_with_its_consequence(
    values: dict[str, Any], spec: DrafterSpec, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step_settings(config(**values), spec, "cuda:0").fused_rows is None
    check_kernels(config(**values), spec, GPU)
    error = capsys.readouterr().err
    assert error.startswith("warning: ")
    assert reason in error
    assert "several times slower (train.kernels=plain accepts this)" in error
    values.setdefault("train", {})["kernels"] = "plain"
    check_kernels(config(**values), spec, GPU)
    check_kernels(config(**values), spec, CPU)
    assert capsys.readouterr().err == ""


def test_the_usual_case_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert plain_because(config(), SPEC) is None
    pytest.importorskip("triton")
    check_kernels(config(), SPEC, GPU)
    assert capsys.readouterr().err == ""


def test_without_triton_the_run_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs triton.*train\.kernels=plain"):
        check_kernels(config(), SPEC, GPU)
    check_kernels(config({"kernels": "plain"}), SPEC, GPU)
    check_kernels(config(), SPEC, CPU)


def test_muon_and_fsdp_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"muon needs whole matrices"):
        config({"optimizer": "muon"}, parallel="fsdp")


def test_a_run_keeps_its_optimizer() -> None:
    """Its moments are of no use to another: resuming with one is refused."""
    built: Any = SimpleNamespace(prepared=SimpleNamespace(info=SimpleNamespace(fingerprint="f", template_kwargs={})))
    checkpoint: Any = SimpleNamespace(path="p", state={"spec": SPEC.to_dict(), **identity(config(), built)})
    muon = identity(config({"optimizer": "muon"}), built)
    with pytest.raises(UserError, match=r"cannot resume p: optimizer was adamw, is muon"):
        check_same_run(checkpoint, SPEC, muon)
