"""The loop: which batch when, what a stop leaves behind, and when it gives up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from train_tiny import (
    CONFIG,
    SETTINGS,
    FakeSource,
    hidden_batch,
    make_drafter,
    make_trainer,
    matrix,
    same,
    weights,
)

from draftmill.train.checkpoint import find_latest, load_drafter, optimizer_tensors
from draftmill.train.optim import apply_update, learning_rate, make_optimizer
from draftmill.train.step import micro_step
from draftmill.train.trainer import MAX_SKIPS_IN_A_ROW, DivergedError

THREE = CONFIG.model_copy(update={"accumulation": 3})


def test_step_s_slot_a_takes_batch_sA_plus_a_and_releases_it(tmp_path: Path) -> None:  # noqa: N802
    source = FakeSource()
    trainer = make_trainer(tmp_path, source, 2, config=THREE)
    assert trainer.run()
    assert source.diary == [(what, index) for index in range(6) for what in ("take", "release")]
    assert trainer.progress.step == 2
    assert trainer.progress.count()["context_tokens"] == sum(
        hidden_batch([3, 2], first=10 * index, index=index).tokens.tokens for index in range(6)
    )


def test_the_loop_is_micro_steps_and_updates_and_nothing_else(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, FakeSource(), 3, config=THREE)
    trainer.run()
    drafter, head = make_drafter(), matrix()
    parameters = list(drafter.parameters())
    optimizer = make_optimizer(parameters, THREE)
    for step in range(3):
        weight = torch.zeros((), dtype=torch.float64)
        for index in range(3 * step, 3 * step + 3):
            batch = hidden_batch([3, 2], first=10 * index, index=index)
            weight += micro_step(drafter, batch, embedding=head, head=head, settings=SETTINGS).totals[1]
        lr = learning_rate(step, 3, THREE.lr, THREE.warmup_ratio)
        apply_update(parameters, optimizer, weight=weight, lr=lr, clip=THREE.clip)
        drafter.zero_grad()
    assert same(weights(drafter), weights(trainer.drafter))
    assert not same(weights(drafter), weights(make_drafter()))


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    logs: list[dict[str, Any]] = []

    class OneBatch(FakeSource):
        def take(self, index: int) -> Any:
            return hidden_batch([6, 6])

    make_trainer(tmp_path, OneBatch(), 150, on_log=logs.append).run()
    assert len(logs) == 150
    assert logs[-1]["loss"] < 0.5 * logs[0]["loss"]


@pytest.mark.parametrize("batches_before_stop", [7, 8])  # 2 steps of 3 batches, then 1 or 2 of the third step
def test_a_stop_in_the_middle_of_accumulation_leaves_the_last_finished_step(
    tmp_path: Path, batches_before_stop: int
) -> None:
    source, finished = FakeSource(), make_trainer(tmp_path / "finished", FakeSource(), 4, config=THREE)
    takes = lambda: sum(what == "take" for what, _ in source.diary)  # noqa: E731
    stopped = make_trainer(
        tmp_path / "stopped", source, 4, config=THREE, should_stop=lambda: takes() >= batches_before_stop
    )
    assert stopped.run() is False
    assert takes() == batches_before_stop
    reference = make_trainer(
        tmp_path / "reference", FakeSource(), 4, config=THREE, should_stop=lambda: reference.progress.step == 2
    )
    assert reference.run() is False
    assert stopped.progress.step == 2
    assert stopped.progress.count()["context_tokens"] == reference.progress.count()["context_tokens"]
    assert same(weights(stopped.drafter), weights(reference.drafter))
    assert same(optimizer_tensors(stopped.optimizer), optimizer_tensors(reference.optimizer))
    assert all(parameter.grad is None for parameter in stopped.parameters)
    # whoever goes on from the checkpoint ends where the uninterrupted run ends
    checkpoint, rejected = find_latest(tmp_path / "stopped")
    assert rejected == []
    assert checkpoint is not None
    assert checkpoint.step == 2
    source = FakeSource()
    resumed = make_trainer(tmp_path / "stopped", source, 4, config=THREE, drafter=load_drafter(checkpoint))
    resumed.resume(checkpoint)
    assert resumed.run()
    finished.run()
    assert source.diary[0] == ("take", 6)
    assert same(weights(resumed.drafter), weights(finished.drafter))
    assert same(optimizer_tensors(resumed.optimizer), optimizer_tensors(finished.optimizer))
    assert resumed.progress.count()["context_tokens"] == finished.progress.count()["context_tokens"]


def test_muon_goes_on_from_a_checkpoint_bit_by_bit(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"optimizer": "muon"})
    finished = make_trainer(tmp_path / "finished", FakeSource(), 4, config=config)
    assert finished.run()
    stopped = make_trainer(
        tmp_path / "stopped", FakeSource(), 4, config=config, should_stop=lambda: stopped.progress.step == 2
    )
    assert not stopped.run()
    checkpoint, _ = find_latest(tmp_path / "stopped")
    assert checkpoint is not None
    resumed = make_trainer(
        tmp_path / "stopped", FakeSource(), 4, config=config, drafter=load_drafter(checkpoint)
    )  # fmt: skip
    resumed.resume(checkpoint)
    assert resumed.run()
    assert same(weights(resumed.drafter), weights(finished.drafter))
    assert same(optimizer_tensors(resumed.optimizer), optimizer_tensors(finished.optimizer))


def test_resuming_between_two_log_lines_gives_the_same_lines(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"log_every": 4})
    whole: list[dict[str, Any]] = []
    make_trainer(tmp_path / "whole", FakeSource(), 8, config=config, on_log=whole.append).run()
    parts: list[dict[str, Any]] = []
    first = make_trainer(
        tmp_path / "parts", FakeSource(), 8, config=config, on_log=parts.append,
        should_stop=lambda: first.progress.step == 6,
    )  # fmt: skip
    first.run()
    checkpoint, _ = find_latest(tmp_path / "parts")
    assert checkpoint is not None
    second = make_trainer(
        tmp_path / "parts", FakeSource(), 8, config=config, on_log=parts.append, drafter=load_drafter(checkpoint)
    )  # fmt: skip
    second.resume(checkpoint)
    second.run()
    assert parts == whole
    assert [line["step"] for line in whole] == [4, 8]
    assert [line["averaged_steps"] for line in whole] == [4, 4]
    assert [line["blocks"] for line in whole] == [20.0, 20.0], "the average is over all steps since the last line"


def test_a_stop_before_the_first_batch_saves_step_0_and_takes_none(tmp_path: Path) -> None:
    source = FakeSource()
    trainer = make_trainer(tmp_path, source, 4, should_stop=lambda: True)
    assert trainer.run() is False
    assert source.diary == []
    checkpoint, _ = find_latest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 0
    assert same(weights(load_drafter(checkpoint)), weights(make_drafter()))


def test_checkpoints_are_saved_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"save_every": 2, "keep": 10})
    saves: list[float] = []
    make_trainer(tmp_path, FakeSource(), 5, config=config, on_save=saves.append).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004", "step-00000005"]
    assert len(saves) == 3
    make_trainer(tmp_path / "even", FakeSource(), 4, config=config, on_save=saves.append).run()
    assert len(saves) == 5, "the last step is not saved twice"


def test_case_23_non_finite_steps_are_skipped_and_counted(tmp_path: Path) -> None:
    logs: list[dict[str, Any]] = []
    trainer = make_trainer(tmp_path, FakeSource(broken={1, 2, 4}), 5, on_log=logs.append)
    seen: list[dict[str, torch.Tensor]] = []
    trainer.on_log = lambda line: (logs.append(line), seen.append(weights(trainer.drafter)))
    assert trainer.run()
    assert [line["skipped"] for line in logs] == [0, 1, 2, 2, 3]
    assert [line["gradient_norm"] is None for line in logs] == [False, True, True, False, True]
    assert same(seen[0], seen[1])
    assert same(seen[1], seen[2])
    assert not same(seen[2], seen[3])
    assert same(seen[3], seen[4])
    assert all(value.isfinite().all() for value in seen[-1].values())
    assert (trainer.progress.count()["skipped"], trainer.progress.count()["skipped_in_a_row"]) == (3, 1)
    assert trainer.progress.step == 5, "a skipped step is a step: the schedule goes on"


def test_case_23_one_bad_batch_of_a_step_skips_the_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, FakeSource(broken={1}), 1, config=THREE)
    trainer.run()
    assert trainer.progress.count()["skipped"] == 1
    assert same(weights(trainer.drafter), weights(make_drafter()))


def test_case_23_ten_in_a_row_stop_the_run(tmp_path: Path) -> None:
    source = FakeSource(broken=set(range(2, 100)))
    trainer = make_trainer(tmp_path, source, 100)
    with pytest.raises(DivergedError, match=r"10 updates in a row .*up to step 12.*Lower train\.lr"):
        trainer.run()
    assert MAX_SKIPS_IN_A_ROW == 10
    assert source.diary[-1] == ("release", 11)
    reference = make_trainer(
        tmp_path / "reference", FakeSource(), 100, should_stop=lambda: reference.progress.step == 2
    )
    reference.run()
    assert same(weights(trainer.drafter), weights(reference.drafter)), "the weights are those before them"


def test_case_23_a_finite_step_starts_the_count_anew(tmp_path: Path) -> None:
    broken = set(range(1, 20)) - {10}  # 9 bad steps, a good one, 9 bad ones
    trainer = make_trainer(tmp_path, FakeSource(broken=broken), 20)
    assert trainer.run()
    assert (trainer.progress.count()["skipped"], trainer.progress.count()["skipped_in_a_row"]) == (18, 9)


def test_case_23_the_count_survives_a_resume(tmp_path: Path) -> None:
    first = make_trainer(
        tmp_path, FakeSource(broken=set(range(100))), 100, should_stop=lambda: first.progress.step == 6
    )  # fmt: skip
    first.run()
    checkpoint, _ = find_latest(tmp_path)
    assert checkpoint is not None
    second = make_trainer(tmp_path, FakeSource(broken=set(range(100))), 100, drafter=load_drafter(checkpoint))
    second.resume(checkpoint)
    with pytest.raises(DivergedError, match="up to step 10"):
        second.run()


def test_case_24_a_batch_without_valid_anchor_leaves_the_step_to_the_others(tmp_path: Path) -> None:
    with_empty = make_trainer(tmp_path / "a", FakeSource([[3, 2], [0], [0, 0]]), 1, config=THREE)
    with_empty.run()
    alone = make_trainer(tmp_path / "b", FakeSource([[3, 2]]), 1)
    alone.run()
    assert same(weights(with_empty.drafter), weights(alone.drafter))
    assert not same(weights(alone.drafter), weights(make_drafter()))
    assert with_empty.progress.count()["skipped"] == 0


def test_case_24_a_step_without_any_anchor_changes_nothing_and_is_no_divergence(tmp_path: Path) -> None:
    counts = [[3]] + [[0]] * 12
    trainer = make_trainer(tmp_path, FakeSource(counts), 13)
    assert trainer.run()
    assert (trainer.progress.count()["skipped"], trainer.progress.count()["skipped_in_a_row"]) == (0, 0)
    reference = make_trainer(tmp_path / "b", FakeSource([[3]]), 13, should_stop=lambda: reference.progress.step == 1)
    reference.run()
    assert same(weights(trainer.drafter), weights(reference.drafter))


def test_one_checkpoint_can_be_resumed_twice(tmp_path: Path) -> None:
    make_trainer(tmp_path, FakeSource(), 2).run()
    checkpoint, _ = find_latest(tmp_path)
    assert checkpoint is not None
    for _ in range(2):
        trainer = make_trainer(tmp_path, FakeSource(), 4, drafter=load_drafter(checkpoint))
        trainer.resume(checkpoint)
        assert trainer.progress.step == 2
