"""A checkpoint is complete or it is none."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train_tiny import SPEC, FakeSource, make_trainer, same, weights

from draftmill.drafter.model import Drafter
from draftmill.errors import UserError
from draftmill.train import checkpoint as module
from draftmill.train.checkpoint import (
    find_latest,
    load_drafter,
    load_optimizer,
    open_checkpoint,
    optimizer_tensors,
    save_checkpoint,
)
from draftmill.train.optim import make_optimizer
from draftmill.train.parallel import Alone

FILES = ["drafter.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Drafter, torch.optim.Optimizer]:
    """A drafter and optimizer with moments, after three steps."""
    trainer = make_trainer(tmp_path_factory.mktemp("trained"), FakeSource(), 3)
    trainer.run()
    return trainer.drafter, trainer.optimizer


def save(folder: Path, step: int, trained: tuple[Drafter, torch.optim.Optimizer], *, keep: int = 5) -> Path:
    drafter, optimizer = trained
    weights, moments = drafter.state_dict(), optimizer_tensors(optimizer)
    return save_checkpoint(folder, step, drafter.spec, weights, moments, {"note": f"step {step}"}, keep=keep)


def names(folder: Path) -> list[str]:
    """Everything in the folder, hidden leftovers too."""
    return sorted(path.name for path in folder.iterdir())


def test_a_round_trip_is_bit_equal_with_moments(tmp_path: Path, trained: tuple[Drafter, Any]) -> None:
    drafter, optimizer = trained
    path = save(tmp_path, 3, trained)
    assert names(path) == sorted(FILES)
    checkpoint, rejected = find_latest(tmp_path)
    assert rejected == []
    assert checkpoint is not None
    assert (checkpoint.path, checkpoint.step, checkpoint.state["note"]) == (path, 3, "step 3")
    assert checkpoint.spec == SPEC
    loaded = load_drafter(checkpoint)
    assert same(weights(loaded), weights(drafter))
    fresh = make_optimizer(loaded.parameters(), make_trainer(tmp_path, FakeSource(), 1).config)
    load_optimizer(checkpoint, fresh, Alone().part)
    moments = optimizer_tensors(optimizer)
    assert same(optimizer_tensors(fresh), moments)
    assert {name.split(".")[1] for name in moments} == {"step", "exp_avg", "exp_avg_sq"}
    assert len(moments) == 3 * len(list(drafter.parameters()))
    assert any(value.abs().sum() > 0 for name, value in moments.items() if name.endswith("exp_avg_sq"))


def test_moments_find_their_parameters(tmp_path: Path, trained: tuple[Drafter, Any]) -> None:
    drafter, optimizer = trained
    save(tmp_path, 3, trained)
    checkpoint = open_checkpoint(tmp_path)
    loaded = load_drafter(checkpoint)
    fresh = make_optimizer(loaded.parameters(), make_trainer(tmp_path, FakeSource(), 1).config)
    load_optimizer(checkpoint, fresh, Alone().part)
    for name, parameter in drafter.named_parameters():
        state = fresh.state[loaded.get_parameter(name)]
        assert torch.equal(state["exp_avg"], optimizer.state[parameter]["exp_avg"]), name


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept_and_the_oldest_removed(tmp_path: Path, trained: Any, keep: int) -> None:
    for step in (9, 10, 99, 100, 1000):
        save(tmp_path, step, trained, keep=keep)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (9, 10, 99, 100, 1000)][-keep:]


@pytest.mark.slow
def test_case_33_kill_9_while_saving_never_costs_a_complete_checkpoint(tmp_path: Path) -> None:
    script = Path(__file__).parent / "saver_under_fire.py"
    kills = 25
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(kills), "0"],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == kills
    former = 0
    for found in rounds:
        assert found["fits"], found
        assert max(former, found["done"]) <= found["found"] <= found["begin"], found
        former = found["found"]
    assert former > kills, "too few saves went through to say anything"
    assert any(found["begin"] > found["done"] for found in rounds), "no kill hit a save"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "missing"])
def test_case_33_a_damaged_newest_checkpoint_is_passed_over_and_named(
    tmp_path: Path, trained: Any, name: str, damage: str
) -> None:
    save(tmp_path, 1, trained)
    path = save(tmp_path, 2, trained)
    content = (path / name).read_bytes()
    if damage == "missing":
        (path / name).unlink()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        (path / name).write_bytes({"truncated": content[:-7], "empty": b"", "flipped": flipped}[damage])
    latest, rejected = find_latest(tmp_path)
    assert latest is not None
    assert latest.step == 1
    assert len(rejected) == 1
    assert rejected[0].startswith("step-00000002 is not usable (")
    reasons = [f"{name} is missing", f"{name} differs from its manifest", "is cut short"]
    if name == "manifest.json" and damage == "flipped":  # a flipped digest or file name
        reasons += ["differs from its manifest", "is missing"]
    assert any(reason in rejected[0] for reason in reasons), rejected[0]
    if damage == "missing":
        assert f"({name} is missing)" in rejected[0]
    elif name.endswith(".safetensors"):
        assert f"({name} differs from its manifest)" in rejected[0]


def test_case_33_leftovers_of_a_killed_save_are_no_checkpoint(tmp_path: Path, trained: Any) -> None:
    path = save(tmp_path, 1, trained)
    shutil.copytree(path, tmp_path / ".step-00000002.partial")
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000004").write_text("a file")
    latest, rejected = find_latest(tmp_path)
    assert latest is not None
    assert latest.step == 1
    assert rejected == ["step-00000003 is not usable (manifest.json is missing)"]
    save(tmp_path, 2, trained)
    assert open_checkpoint(tmp_path).step == 2


def full_disk(after: int, written: list[str]) -> Any:
    """A save_file that writes half of file number `after` and then finds the disk full."""
    own = module.save_file

    def save_file(tensors: dict[str, Tensor], path: Path) -> None:
        written.append(Path(path).name)
        own(tensors, path)
        if len(written) == after:
            content = Path(path).read_bytes()
            Path(path).write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    return save_file


@pytest.mark.parametrize("after", [1, 2])
def test_case_33_a_full_disk_leaves_the_former_checkpoint(
    tmp_path: Path, trained: Any, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    save(tmp_path, 1, trained)
    written: list[str] = []
    monkeypatch.setattr(module, "save_file", full_disk(after, written))
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2, trained, keep=1)
    assert len(written) == after
    assert names(tmp_path) == ["step-00000001"], "no partial folder may stay"
    latest, rejected = find_latest(tmp_path)
    assert rejected == []
    assert latest is not None
    assert same(weights(load_drafter(latest)), weights(trained[0]))
    monkeypatch.undo()
    save(tmp_path, 2, trained)
    assert open_checkpoint(tmp_path).step == 2


def test_case_33_a_write_that_fails_on_its_way_to_the_disk_leaves_the_former_checkpoint(
    tmp_path: Path, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, trained)

    def fsync(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module.os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output"):
        save(tmp_path, 2, trained, keep=1)
    assert names(tmp_path) == ["step-00000001"]
    assert open_checkpoint(tmp_path).step == 1


def test_case_33_saving_a_step_once_more_never_leaves_none(
    tmp_path: Path, trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run that is stopped before its first step saves the step it came from."""
    save(tmp_path, 1, trained, keep=1)
    found: list[int | None] = []

    def look_first(own: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            latest, _ = find_latest(tmp_path)  # what a kill at this moment would leave
            found.append(None if latest is None else latest.step)
            return own(*arguments, **options)

        return call

    monkeypatch.setattr(Path, "rename", look_first(Path.rename))
    monkeypatch.setattr(module, "save_file", look_first(module.save_file))
    monkeypatch.setattr(module.shutil, "rmtree", look_first(shutil.rmtree))
    save(tmp_path, 1, trained, keep=1)
    save(tmp_path, 2, trained, keep=1)
    assert None not in found
    assert len(found) >= 4, "the second step is written, named, and the first one removed"
    assert names(tmp_path) == ["step-00000002"]


def test_case_33_a_save_never_removes_itself(tmp_path: Path, trained: Any) -> None:
    """Step 4 was damaged, so the run went on from step 2 and is stopped at step 3."""
    save(tmp_path, 2, trained)
    damaged = save(tmp_path, 4, trained)
    (damaged / "drafter.safetensors").write_bytes(b"")
    assert open_checkpoint(tmp_path).step == 2
    path = save(tmp_path, 3, trained, keep=1)
    assert path.exists()
    assert open_checkpoint(tmp_path).step == 3
    assert names(tmp_path) == ["step-00000003"], "the damaged one of the run that was given up goes"


def test_case_33_a_killed_saves_partial_folder_goes_with_the_next_save(tmp_path: Path, trained: Any) -> None:
    path = save(tmp_path, 1, trained)
    shutil.copytree(path, tmp_path / ".step-00000002.partial")
    save(tmp_path, 3, trained)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_case_33_a_damaged_checkpoint_of_the_same_step_is_written_anew(tmp_path: Path, trained: Any) -> None:
    save(tmp_path, 1, trained)
    damaged = save(tmp_path, 2, trained)
    (damaged / "optimizer.safetensors").write_bytes(b"")
    save(tmp_path, 2, trained)
    assert open_checkpoint(tmp_path).step == 2


def test_case_33_a_manifest_must_name_every_file(tmp_path: Path, trained: Any) -> None:
    path = save(tmp_path, 1, trained)
    (path / "manifest.json").write_text("{}")
    assert find_latest(tmp_path)[0] is None


def test_a_checkpoint_is_opened_by_step_folder_checkpoints_folder_or_run_folder(tmp_path: Path, trained: Any) -> None:
    folder = tmp_path / "run" / "checkpoints"
    first, second = save(folder, 1, trained), save(folder, 2, trained)
    assert open_checkpoint(first).step == 1
    assert open_checkpoint(folder).path == second
    assert open_checkpoint(tmp_path / "run").path == second
    (second / "optimizer.safetensors").write_bytes(b"x")
    assert open_checkpoint(tmp_path / "run").step == 1
    with pytest.raises(UserError, match=r"not a complete checkpoint \(optimizer.safetensors differs"):
        open_checkpoint(second)
    (first / "drafter.safetensors").unlink()
    with pytest.raises(UserError, match=r"no complete checkpoint in .*step-00000002 .*; step-00000001 .* is missing"):
        open_checkpoint(tmp_path / "run")
    with pytest.raises(UserError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="it holds none"):
        open_checkpoint(tmp_path / "empty")


def test_another_format_is_named(tmp_path: Path, trained: Any) -> None:
    path = save(tmp_path, 1, trained)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format": 2}))
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"state.json": module._digest(path / "state.json")}))
    latest, rejected = find_latest(tmp_path)
    assert latest is None
    assert rejected == ["step-00000001 is not usable (its format is 2, this version reads 1)"]


def test_no_folder_means_no_checkpoint(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "nowhere") == (None, [])
    assert find_latest(tmp_path) == (None, [])
