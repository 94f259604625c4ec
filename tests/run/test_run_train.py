"""Training runs as real processes: finished, killed, interrupted, resumed, refused."""

from __future__ import annotations

import errno
import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from run_helpers import Cli, metrics, wait_for
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


def weights(run: Path, step: int) -> dict[str, object]:
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {
        f"{name}/{key}": value
        for name in ("drafter", "optimizer")
        for key, value in load_file(folder / f"{name}.safetensors").items()
    }


def assert_same_run(one: Path, two: Path, step: int) -> None:
    assert metrics(one) == metrics(two)
    first, second = weights(one, step), weights(two, step)
    assert first.keys() == second.keys()
    assert all(bool((first[key] == second[key]).all()) for key in first)  # type: ignore[attr-defined]


def test_a_run_leaves_a_complete_record(cli: Cli) -> None:
    done = cli.train("run", "decode_check_prompts=2", "train.log_every=6")
    assert done.returncode == 0, done.stderr
    run = cli.folder / "run"
    assert [row["step"] for row in metrics(run)] == [6, 12, 18, 24]
    rows = metrics(run)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert "max_steps: 24" in done.stdout  # the resolved config
    assert "max_steps: 24" in (run / "config.yaml").read_text()
    record = json.loads((run / "run.json").read_text())
    assert record["versions"]["torch"]
    assert record["spec"]["taps"] == [1, 3]
    assert record["spec"]["mask_token_id"] == 49152
    assert "unused embedding row" in done.stderr
    assert list((run / "tensorboard").glob("events*"))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000020", "step-00000024"]
    assert "decode check: τ" in done.stderr
    assert "100% of blocks agree" in done.stderr
    status = cli.run("status", str(run), "--json")
    assert status.returncode == 0
    assert json.loads(status.stdout)["state"] == "finished"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    phases = [event["text"] for event in events if event["kind"] == "phase" and "worker" not in event]
    assert phases == ["loading", "compiling", "training", "checking", "finished"]
    assert [event["step"] for event in events if event["kind"] == "checkpoint"] == [5, 10, 15, 20, 24]
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    watched = cli.run("watch", str(run))
    assert watched.returncode == 0, watched.stderr
    assert "finished" in watched.stdout
    assert "▁" in watched.stdout
    waited = cli.run("status", str(run), "--json", "--wait", "training")
    assert json.loads(waited.stdout)["phase"] == "finished", "a run that has ended is not waited for"
    lines = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert len(lines) == 4
    assert "estimating" in lines[0]
    assert "estimating" not in lines[-1]


def test_case_34_killed_at_a_random_step_and_resumed_equals_uninterrupted(cli: Cli) -> None:
    assert cli.train("whole").returncode == 0
    for attempt in range(2):
        name = f"killed-{attempt}"
        run = cli.folder / name
        last = random.randint(6, 20)
        process = cli.start_train(name)
        wait_for(lambda run=run, last=last: len(metrics(run)) >= last)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        died = cli.run("status", str(run), "--json")
        assert died.returncode == 4
        assert json.loads(died.stdout)["state"] == "died"
        resumed = cli.train(name, "--resume")
        assert resumed.returncode == 0, resumed.stderr
        assert "resuming from" in resumed.stderr
        assert_same_run(cli.folder / "whole", run, 24)


def test_interrupted_runs_save_exit_quickly_and_go_on_exactly(cli: Cli) -> None:
    options = ("train.accumulation=3", "target.reuse_states_gb=1", "train.max_steps=16")
    assert cli.train("whole", *options).returncode == 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        run = cli.folder / number.name
        process = cli.start_train(number.name, *options)
        wait_for(lambda run=run: len(metrics(run)) >= 3)
        process.send_signal(number)
        started = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert time.monotonic() - started < 30
        assert process.returncode == code, err
        assert f"stopped at step {len(metrics(run))} of 16: {number.name}" in err
        assert cli.run("status", str(run)).returncode == 3
        assert cli.train(number.name, "--resume", *options).returncode == 0
        assert_same_run(cli.folder / "whole", run, 16)


def test_case_32_a_second_run_in_the_folder_is_refused(cli: Cli) -> None:
    process = cli.start_train("run", "train.max_steps=100000", "train.epochs=100000")
    wait_for(lambda: len(metrics(cli.folder / "run")) >= 1)
    second = cli.train("run", "--resume")
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert second.returncode == 2
    assert "in use by a run that is still going" in second.stderr
    assert str(process.pid) in second.stderr
    third = cli.train("run")
    assert third.returncode == 2
    assert "already holds a run at step" in third.stderr
    assert "Traceback" not in second.stderr + third.stderr


def test_case_33_a_truncated_checkpoint_is_passed_over_and_said_so(cli: Cli) -> None:
    assert cli.train("whole").returncode == 0
    assert cli.train("run", "train.keep=5").returncode == 0
    run = cli.folder / "run"
    file = run / "checkpoints" / "step-00000024" / "drafter.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    (run / "checkpoints" / "step-00000020" / "manifest.json").unlink()
    resumed = cli.train("run", "--resume", "train.keep=5")
    assert resumed.returncode == 0, resumed.stderr
    assert "step-00000024 is not usable (drafter.safetensors differs from its manifest)" in resumed.stderr
    assert "step-00000020 is not usable (manifest.json is missing)" in resumed.stderr
    assert "resuming from" in resumed.stderr
    assert "step-00000015" in resumed.stderr
    assert_same_run(cli.folder / "whole", run, 24)


def test_resume_names_what_changed_and_refuses_another_run(cli: Cli, prepared: Path) -> None:
    assert cli.train("run", "train.max_steps=6").returncode == 0
    longer = cli.train("run", "--resume", "train.max_steps=8", "train.lr=0.001")
    assert longer.returncode == 0, longer.stderr
    assert "config changed since the run began: train.lr 0.003 → 0.001" in longer.stderr
    assert "train.max_steps 6 → 8" in longer.stderr
    for override, words in (
        ("drafter.layers=2", "layer_types was"),
        ("seed=5", "seed was 0, is 5"),
        ("data.token_budget=256", "token_budget was 192, is 256"),
    ):
        refused = cli.train("run", "--resume", override)
        assert refused.returncode == 2
        assert words in refused.stderr
        assert "start anew in another run_dir" in refused.stderr


def test_case_15_a_target_that_yields_nan_is_refused_with_document_and_layer(cli: Cli, tiny_target: Path) -> None:
    import torch
    from safetensors.torch import save_file

    broken = cli.folder / "broken"
    shutil.copytree(tiny_target, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    done = cli.train("run", f"target.model={broken}")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "hidden state of target layer 3 is not finite" in done.stderr
    assert "of the prepared set, token 0 of it" in done.stderr
    status = json.loads(cli.run("status", str(cli.folder / "run"), "--json").stdout)
    assert status["state"] == "failed"
    assert "not finite" in status["reason"]


def test_max_minutes_ends_the_run_in_good_order(cli: Cli) -> None:
    done = cli.train("run", "train.max_steps=100000", "train.epochs=100000", "train.max_minutes=0.02")
    assert done.returncode == 0, done.stderr
    assert "train.max_minutes (0.02) is over" in done.stderr
    assert "the schedule was cut" in done.stderr
    assert list((cli.folder / "run" / "checkpoints").glob("step-*"))


def test_the_same_seed_gives_the_same_drafter_and_another_seed_another(cli: Cli) -> None:
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        assert cli.train(name, f"seed={seed}", "train.max_steps=4").returncode == 0
    assert_same_run(cli.folder / "one", cli.folder / "two", 4)
    assert metrics(cli.folder / "one") != metrics(cli.folder / "other")


def test_reused_states_change_nothing(cli: Cli) -> None:
    assert cli.train("computed").returncode == 0
    assert cli.train("reused", "target.reuse_states_gb=1").returncode == 0
    assert cli.train("partly", "target.reuse_states_gb=0.0001").returncode == 0
    assert_same_run(cli.folder / "computed", cli.folder / "reused", 24)
    assert_same_run(cli.folder / "computed", cli.folder / "partly", 24)


def test_case_33_a_full_disk_is_said_with_what_is_left(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftmill.config import load_run_config
    from draftmill.errors import UserError
    from draftmill.run.train import train
    from draftmill.train import checkpoint

    own, saved = checkpoint.save_file, []

    def save_file(tensors: dict[str, object], path: Path) -> None:
        saved.append(path)
        if len(saved) > 3:  # the second checkpoint's second file
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        own(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    with pytest.raises(UserError, match=r"is full; .*step-00000005 is complete\. Free space, then go on with --resume"):
        train(load_run_config(cli.config, []), resume=False)
    assert [p.name for p in (cli.folder / "run" / "checkpoints").iterdir()] == ["step-00000005"]
    monkeypatch.undo()
    assert cli.train("run", "--resume").returncode == 0
    assert cli.train("whole").returncode == 0
    assert_same_run(cli.folder / "whole", cli.folder / "run", 24)
