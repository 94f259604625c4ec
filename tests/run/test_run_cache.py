"""`cache: DIR` in real runs: the same drafter, and no target once all states are on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from run_helpers import Cli, metrics

from draftmill.run.events import tail

STEPS = 24  # of one batch each; an epoch has about 20


def weights_of(folder: Path) -> bytes:
    return (folder / "checkpoints" / f"step-{STEPS:08d}" / "drafter.safetensors").read_bytes()


@pytest.mark.slow
def test_the_drafter_is_the_same_and_the_second_run_loads_no_target(cli: Cli, tiny_target: Path) -> None:
    cache = f"cache={cli.folder / 'states'}"
    plain = cli.train("plain")
    assert plain.returncode == 0, plain.stderr
    first = cli.train("first", cache)
    assert first.returncode == 0, first.stderr
    assert "target loaded" in first.stderr
    assert "bins kept (no limit), 0 present" in first.stderr
    second = cli.train("second", cache, "decode_check_prompts=2")
    assert second.returncode == 0, second.stderr
    assert "no target is loaded" in second.stderr
    assert "target loaded" not in second.stderr
    assert "decode check: left out" in second.stderr
    split = cli.train("split", cache, "devices.targets=cpu*2", "devices.drafters=cpu")
    assert split.returncode == 0, split.stderr
    assert "target loaded" not in split.stderr
    for name in ("first", "second", "split"):
        assert weights_of(cli.folder / name) == weights_of(cli.folder / "plain"), name
        assert [{k: v for k, v in row.items() if k != "waits"} for row in metrics(cli.folder / name)] == metrics(
            cli.folder / "plain"
        )


@pytest.mark.slow
def test_a_damaged_file_is_made_again_and_a_lost_target_is_loaded_after_all(cli: Cli) -> None:
    states = cli.folder / "states"
    assert cli.train("first", f"cache={states}").returncode == 0
    damaged = sorted(states.glob("bin-*.safetensors"))[3]
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    second = cli.train("second", f"cache={states}", "devices.targets=cpu", "devices.drafters=cpu")
    assert second.returncode == 0, second.stderr
    assert f"{damaged} cannot be used" in second.stderr
    warned = [event["text"] for event in tail(cli.folder / "second" / "events.jsonl") if event["kind"] == "warning"]
    assert len([text for text in warned if f"{damaged} cannot be used" in text]) == 1  # though a worker said it
    assert "the target is loaded after all" in second.stderr
    assert weights_of(cli.folder / "second") == weights_of(cli.folder / "first")
    assert damaged.exists()


@pytest.mark.long
@pytest.mark.slow
def test_half_a_cache_serves_and_a_foreign_one_is_refused(cli: Cli, tiny_target: Path, tmp_path: Path) -> None:
    states = cli.folder / "states"
    slot = 192 * 2 * 32 * 2  # tokens × taps × hidden size × bytes
    half = cli.train("half", f"cache={states}", f"cache_gb={10 * slot / 1e9}")
    assert half.returncode == 0, half.stderr
    assert "cache: 10 of" in half.stderr
    assert len(list(states.glob("bin-*.safetensors"))) == 10
    whole = cli.train("whole", f"cache={states}")
    assert "target loaded" in whole.stderr
    assert weights_of(cli.folder / "whole") == weights_of(cli.folder / "half")
    other = cli.train("other", f"cache={states}", "seed=1")
    assert other.returncode == 2
    assert other.stderr.splitlines()[-1].startswith("error: ")
    assert "seed" in other.stderr.splitlines()[-1]
    wider = tmp_path / "wider"
    shutil.copytree(tiny_target, wider)
    config = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    changed = cli.train("changed", f"cache={states}", f"target.model={wider}")
    assert changed.returncode == 2, changed.stderr
    assert changed.stderr.splitlines()[-1].startswith("error: ")


def test_a_limit_without_a_folder_is_refused(cli: Cli) -> None:
    done = cli.train("run", "cache_gb=1")
    assert done.returncode == 2
    assert "name a folder: cache=DIR" in done.stderr
