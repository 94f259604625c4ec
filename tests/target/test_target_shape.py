"""Sizes of a target are known from its config alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftmill.errors import UserError
from draftmill.target.shape import TargetShape, load_config, read_shape


def test_sizes_of_the_real_target(smollm2: Path) -> None:
    shape = read_shape(load_config(str(smollm2)))
    assert shape == TargetShape(
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=pytest.approx(1e-5, rel=1e-6),
        rope_theta=100000.0,
        layers=30,
        vocab_size=49152,
        max_position_embeddings=8192,
    )


@pytest.mark.parametrize(
    ("name", "theta"), [("llama", 10000.0), ("gemma3", 1_000_000.0), ("hybrid", 10000.0), ("moe", 10000.0)]
)
def test_sizes_of_other_architectures(folders: dict[str, Path], name: str, theta: float) -> None:
    shape = read_shape(load_config(str(folders[name])))
    assert (shape.hidden_size, shape.layers, shape.head_dim, shape.vocab_size) == (32, 4, 8, 97)
    assert (shape.num_attention_heads, shape.num_key_value_heads) == (4, 2)
    assert shape.rope_theta == theta


def test_no_key_value_heads_and_no_head_size_mean_plain_attention() -> None:
    config = SimpleNamespace(
        model_type="made", hidden_size=48, intermediate_size=96, num_attention_heads=6, num_hidden_layers=2,
        vocab_size=10, max_position_embeddings=128,
    )  # fmt: skip
    shape = read_shape(config)
    assert (shape.num_key_value_heads, shape.head_dim, shape.rope_theta) == (6, 8, None)
    del config.intermediate_size
    with pytest.raises(UserError, match=r"\(made\) has no intermediate_size"):
        read_shape(config)


def test_a_folder_without_config_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"target\.model: .*config\.json") as caught:
        load_config(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_architecture_and_a_missing_hub_id_are_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-architecture"}))
    for model in (str(tmp_path), "nobody/has-this-model"):
        with pytest.raises(UserError, match=r"target\.model"):
            load_config(model)
