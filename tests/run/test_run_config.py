"""Case 35: nothing in a config is ignored silently, and what is wrong is named with its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from draftmill.config import RunConfig, dump_yaml, known_keys, load_run_config, read_yaml
from draftmill.errors import UserError

MINIMAL = "run_dir: r\ndata: {prepared: p}\ntarget: {model: m}\n"


def load(tmp_path: Path, text: str = MINIMAL, *overrides: str) -> RunConfig:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load_run_config(path, list(overrides))


def test_defaults_are_the_papers_recipe(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.drafter.layers, config.drafter.block_size) == (5, 16)
    assert (config.train.lr, config.train.clip, config.train.warmup_ratio, config.train.epochs) == (6e-4, 1.0, 0.04, 6)
    assert config.anchors == 512 * config.data.token_budget // 4096


def test_overrides_are_yaml_and_reach_every_depth(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "train.lr=3e-4", "drafter.taps=[1, 2]", "seed=7", "drafter.mask_token_id=null")
    assert config.train.lr == 3e-4
    assert config.drafter.taps == [1, 2]
    assert config.seed == 7
    assert config.drafter.mask_token_id is None


def test_the_dumped_config_loads_to_the_same(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "train.betas=[0.9, 0.95]", "train.max_steps=5")
    assert load(tmp_path, dump_yaml(config)) == config
    assert set(known_keys(RunConfig)) >= {"train.lr", "data.token_budget", "target.model", "drafter.taps", "seed"}
    assert set(yaml.safe_load(dump_yaml(config))["train"]) == {
        k.removeprefix("train.") for k in known_keys(RunConfig) if k.startswith("train.")
    }


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.learning_rate=1", "unknown key train.learning_rate"),
        ("train.lrr=1", "unknown key train.lrr; did you mean train.lr?"),
        ("lr=1", "unknown key lr; did you mean train.lr?"),
        ("block_size=8", "unknown key block_size; did you mean drafter.block_size?"),
        ("drafter.block_sise=8", "did you mean drafter.block_size?"),
        ("train.lr=fast", "train.lr: "),
        ("train.lr=-1", "train.lr: Input should be greater than 0 (got -1)"),
        ("drafter.sliding_window=128", "drafter: sliding_window is set but no layer slides"),
        ("train.anchors=20000", "more than data.token_budget"),
        ("train", "not of the form key=value"),
        ("seed.x.y=1", "seed is a single value"),
    ],
)
def test_case_35_wrong_keys_and_values_are_named(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, MINIMAL + "seed: 0\n", override)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_keys_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.prepared is missing; target\.model is missing"):
        load(tmp_path, "run_dir: r\ndata: {}\ntarget: {}\n")
    with pytest.raises(UserError, match="does not exist"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="not valid YAML"):
        load(tmp_path, "a: [")
    with pytest.raises(UserError, match="line 4: target is given twice"):
        load(tmp_path, MINIMAL + "target: {model: other}\n")
    with pytest.raises(UserError, match="must hold keys and values"):
        load(tmp_path, "- a\n")
