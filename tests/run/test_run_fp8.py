"""train.fp8 where it cannot work: refused, with the reason, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftmill.config import RunConfig
from draftmill.drafter.config import FULL, DrafterSpec
from draftmill.errors import UserError
from draftmill.run.build import check_kernels
from draftmill.run.job import check_fp8, step_settings
from draftmill.run.placement import Placement

SPEC = DrafterSpec(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    rms_norm_eps=1e-6, rope_theta=10000.0, block_size=8, mask_token_id=511, taps=(0, 2), layer_types=(FULL,),
    layer_causal=(False,), sliding_window=None, vocab_size=512, num_target_layers=4, max_position_embeddings=1024,
)  # fmt: skip


def config(train: dict[str, Any], **more: Any) -> RunConfig:
    values = {"run_dir": "run", "data": {"prepared": "set", "token_budget": 1024}, "target": {"model": "m"}}
    return RunConfig.model_validate({**values, "train": train, **more})


@pytest.mark.parametrize(
    ("train", "more", "spec", "reason"),
    [
        ({"kernels": "plain"}, {}, SPEC, "train.kernels is plain"),
        ({"dtype": "float32"}, {}, SPEC, "train.dtype is float32"),
        ({}, {"parallel": "fsdp"}, SPEC, "parallel: fsdp"),
        ({}, {}, replace(SPEC, hidden_size=248), "hidden size is 248"),
        ({}, {}, replace(SPEC, vocab_size=505), "vocabulary is 505"),
        ({"fp8": "all"}, {}, replace(SPEC, intermediate_size=504), "intermediate size is 504"),
    ],
)
def test_what_cannot_be_is_refused(train: dict[str, Any], more: dict[str, Any], spec: DrafterSpec, reason: str) -> None:
    train.setdefault("fp8", "head")
    with pytest.raises(UserError, match=rf"train.fp8: {train['fp8']} is not possible: .*{reason}.*; leave it out"):
        check_fp8(config(train, **more), spec, "cuda:0")
    check_fp8(config({**train, "fp8": "none"}, **more), spec, "cuda:0")


def test_what_can_be_is_not_refused() -> None:
    check_fp8(config({"fp8": "head"}), replace(SPEC, intermediate_size=504), "cuda:0")
    check_fp8(config({"fp8": "all"}), SPEC, "cuda:0")


def test_a_torch_without_fp8_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_scaled_mm")
    with pytest.raises(UserError, match=r"has no torch\._scaled_mm"):
        check_fp8(config({"fp8": "all"}), SPEC, "cuda:0")


@pytest.mark.parametrize(("device", "capability"), [("cpu", (9, 0)), ("cuda:0", (8, 0))])
def test_a_device_without_fp8_is_refused(
    device: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(UserError, match=f"needs a GPU with 8-bit products .*{device} is not"):
        step_settings(config({"fp8": "head"}), SPEC, device)


def test_the_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert step_settings(config({"fp8": "all"}), SPEC, "cuda:0").fp8 == "all"
    assert step_settings(config({}), SPEC, "cpu").fp8 == "none"


def test_a_run_on_a_cpu_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UserError, match=r"needs a GPU with 8-bit products .*cpu is not; leave it out"):
        check_kernels(config({"fp8": "head"}), SPEC, Placement((), ("cpu",)))
    check_kernels(config({}), SPEC, Placement((), ("cpu",)))
