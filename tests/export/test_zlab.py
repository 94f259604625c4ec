"""The exported folder says what was trained, and whatever it does not say is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftmill.drafter.config import FULL, SLIDING, DrafterSpec
from draftmill.drafter.model import Drafter, initialise
from draftmill.errors import UserError
from draftmill.export.check import check_export
from draftmill.export.zlab import export_zlab, load_zlab

FIVE = (SLIDING,) * 4 + (FULL,)
MIXED: dict[str, Any] = {
    "layer_types": FIVE,
    "layer_causal": (True,) * 4 + (False,),
    "sliding_window": 6,
    "taps": (1, 2, 3, 4, 6),
}


def make(**changes: Any) -> Drafter:
    values: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "block_size": 4,
        "mask_token_id": 96,
        "taps": (1, 3),
        "layer_types": (FULL, FULL),
        "layer_causal": (False, False),
        "sliding_window": None,
        "vocab_size": 97,
        "num_target_layers": 8,
        "max_position_embeddings": 512,
    }
    drafter = Drafter(DrafterSpec(**(values | changes)))
    initialise(drafter, 0, 0.2)
    return drafter


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def test_layout(tmp_path: Path) -> None:
    folder = export_zlab(make(**MIXED), tmp_path / "d", extra={"template_kwargs": {"enable_thinking": False}})
    config, tensors = config_of(folder), load_file(folder / "model.safetensors")
    assert len(tensors) == 58
    assert tensors["fc.weight"].shape == (32, 5 * 32)
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert not any("embed" in name or "head" in name or name.startswith("model.") for name in tensors)
    wanted = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 5,
        "num_target_layers": 8,
        "layer_types": list(FIVE),
        "sliding_window": 6,
        "use_sliding_window": True,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "dtype": "bfloat16",
        "block_size": 4,
        "dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 2, 3, 4, 6], "block_size": 4},
        "draftmill": {"template_kwargs": {"enable_thinking": False}},
    }
    assert {key: config.get(key) for key in wanted} == wanted
    assert "is_causal" not in config
    assert "enable_thinking=False" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("types", "causal", "stated"),
    [
        ((FULL, FULL), (False, False), False),
        ((FULL, FULL), (True, True), True),
        ((SLIDING, SLIDING), (True, True), True),
        ((SLIDING, SLIDING), (False, False), False),
        ((SLIDING, FULL), (True, True), True),
        ((SLIDING, FULL), (False, False), False),
        ((SLIDING, FULL), (True, False), None),
    ],
)
def test_causality_is_said_where_one_word_fits(
    tmp_path: Path, types: tuple[str, ...], causal: tuple[bool, ...], stated: bool | None
) -> None:
    drafter = make(layer_types=types, layer_causal=causal, sliding_window=6 if SLIDING in types else None)
    folder = export_zlab(drafter, tmp_path / "d")
    config = config_of(folder)
    assert config.get("is_causal") is stated
    assert config["dflash_config"].get("causal") is stated
    assert load_zlab(folder).spec == drafter.spec
    assert check_export(folder, drafter).output_gap == 0


def test_causality_that_cannot_be_said_is_refused(tmp_path: Path) -> None:
    drafter = make(layer_types=(SLIDING, FULL), layer_causal=(False, True), sliding_window=6)
    with pytest.raises(UserError, match="which no checkpoint can say"):
        export_zlab(drafter, tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    drafter = make(**MIXED)
    folder = export_zlab(drafter, tmp_path / "d", dtype=dtype)
    again = load_zlab(folder)
    assert again.spec == drafter.spec
    for name, value in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.to(dtype))
    report = check_export(folder, drafter)
    assert report.tensors == 58
    assert report.context_tokens > 6


def change(key: str, value: Any, inner: str | None = None) -> Callable[[Path], None]:
    """Set a key of config.json, or remove it with None."""

    def apply(folder: Path) -> None:
        config = config_of(folder)
        place = config if inner is None else config[inner]
        place[key] = value
        if value is None:
            del place[key]
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

    return apply


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (change("target_layer_ids", None, "dflash_config"), "target_layer_ids is missing"),
        (change("mask_token_id", None, "dflash_config"), "mask_token_id is missing"),
        (change("head_dim", None), "head_dim is missing"),
        (change("layer_types", None), "layer_types is missing"),
        (change("layer_types", [FULL] * 3), "layer_types has 3 entries"),
        (change("block_size", 5), "block_size must be stated"),
        (change("use_sliding_window", False), "drops their window"),
        (change("sliding_window", None), "sliding_window is missing"),
        (change("rope_scaling", {"rope_type": "yarn"}), "rotary embedding is scaled"),
        (change("rope_theta", 1.0), "rope_theta must be stated"),
        (change("dtype", "float32"), "but config.json states"),
        (change("dtype", "int8"), "dtype int8"),
        (change("hidden_size", 64), "hidden_size is 64, trained was 32"),
        (change("architectures", ["Other"]), "not DFlashDraftModel"),
        (change("final_logit_softcapping", 30.0), "not implemented"),
        (change("causal", True, "dflash_config"), None),
        (drop_tensor, "fc.weight is missing"),
        (truncate, "cannot be read"),
    ],
)
def test_nothing_is_guessed(tmp_path: Path, damage: Callable[[Path], None], named: str | None) -> None:
    drafter = make(**MIXED)
    folder = export_zlab(drafter, tmp_path / "d")
    damage(folder)
    with pytest.raises(UserError, match=named or "layer_causal is") as error:
        check_export(folder, drafter)
    assert "\n" not in str(error.value)


def test_check_names_the_tensor_that_differs(tmp_path: Path) -> None:
    drafter = make()
    folder = export_zlab(drafter, tmp_path / "d")
    with torch.no_grad():
        drafter.layers[1].mlp.up_proj.weight[3, 4] += 0.1
    with pytest.raises(UserError, match=r"tensor layers\.1\.mlp\.up_proj\.weight"):
        check_export(folder, drafter)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    drafter = make()
    with torch.no_grad():
        drafter.norm.weight[0] = 1e6
    with pytest.raises(UserError, match=r"norm\.weight is not finite in float16"):
        export_zlab(drafter, tmp_path / "d", dtype=torch.float16)


def test_only_an_export_is_replaced(tmp_path: Path) -> None:
    folder = export_zlab(make(), tmp_path / "d")
    with pytest.raises(UserError, match="overwrite"):
        export_zlab(make(), folder)
    export_zlab(make(**MIXED), folder, overwrite=True)
    assert load_zlab(folder).spec.layers == 5
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").write_text("x", encoding="utf-8")
    with pytest.raises(UserError, match="no exported drafter"):
        export_zlab(make(), other, overwrite=True)
    (tmp_path / "empty").mkdir()
    export_zlab(make(), tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "empty", "thesis"]


def test_a_failed_export_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = export_zlab(make(), tmp_path / "d")

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("draftmill.export.zlab.save_file", full)
    with pytest.raises(OSError, match="no space"):
        export_zlab(make(**MIXED), folder, overwrite=True)
    assert load_zlab(folder).spec.layers == 2
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
