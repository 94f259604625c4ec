"""`draftmill train --dry-run`: the real way in two steps, which leaves the run alone; what fails is named."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from run_helpers import Cli

from draftmill.config import RunConfig, TrackingConfig, WandbConfig, load_run_config
from draftmill.errors import UserError
from draftmill.run import dry_run as module
from draftmill.run.dry_run import DryRun, dry_run, in_words, memory_lines, read_stages, shortened
from draftmill.run.events import EventLog
from draftmill.run.files import RunFolder
from draftmill.run.peaks import Peaks
from draftmill.run.status import StatusWriter

ALONE = ["settle what the run is", "load the target", "build the drafter, compile", "train", "save", "decode a prompt",
         "export", "check the export"]  # fmt: skip


def config_of(cli: Cli, *overrides: str) -> RunConfig:
    return load_run_config(cli.config, list(overrides))


def stage_names(text: str) -> list[str]:
    return [name for name in ALONE if any(line.strip().startswith(name) for line in text.splitlines())]


def test_a_dry_run_goes_the_whole_way_and_leaves_a_live_folder_alone(cli: Cli) -> None:
    run = cli.folder / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 7}\n')
    with RunFolder(run).locked():  # by the run that is going on
        done = cli.train("run", "--dry-run", "train.save_every=1", "train.log_every=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert stage_names(done.stdout) == ALONE
    assert "2 steps on real data" in done.stdout
    assert "peak memory: host" in done.stdout
    assert "no tokens/s" in done.stdout
    assert "tok/s" not in done.stdout
    assert {path.name for path in run.iterdir()} == {"metrics.jsonl", "lock"}
    assert (run / "metrics.jsonl").read_text() == '{"step": 7}\n'


@pytest.mark.long
def test_a_split_dry_run_uses_the_same_processes_and_leaves_no_folder(cli: Cli) -> None:
    done = cli.train("new", "--dry-run", "devices.targets=cpu", "devices.drafters=cpu", "train.max_steps=1")
    assert done.returncode == 0, done.stdout + done.stderr
    names = stage_names(done.stdout)
    assert {"load the target", "train", "save", "decode a prompt", "check the export"} <= set(names)
    assert "1 step on real data" in done.stdout
    assert "targets on cpu; drafter on cpu" in done.stderr
    assert not (cli.folder / "new").exists()


def test_what_train_refuses_is_a_user_error_and_leaves_nothing(cli: Cli) -> None:
    with pytest.raises(UserError, match="mask"):
        dry_run(config_of(cli, "drafter.mask_token_id=2"), Console(quiet=True))
    assert not (cli.folder / "run").exists()
    refused = cli.train("run", "--dry-run", "--resume")
    assert refused.returncode == 2
    assert "begins anew" in refused.stderr


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`train` that only writes its record, and ends as it is told."""

    def set_up(end: Exception | int = 0, check: dict[str, Any] | None = None, step: int = 2) -> None:
        def train(config: RunConfig, *, resume: bool, trial: bool) -> int:
            assert (resume, trial) == (False, True)
            folder = RunFolder(config.run_dir)
            folder.root.mkdir(parents=True)
            status = StatusWriter(folder)
            for phase in ("loading", "compiling"):
                status.phase(phase)
            if isinstance(end, Exception):
                status.phase("failed", reason=str(end))
                raise end
            status.phase("training", step=0, total_steps=2)
            EventLog(folder.events).add("checkpoint", "step 2", step=2, seconds=0.0)
            status.phase("checking", step=step)
            status.update(decode_check=check)
            return end

        monkeypatch.setattr(module, "train", train)

    return set_up


def shown(config: RunConfig) -> tuple[int, str]:
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=150, file=nowhere)
        return dry_run(config, console), console.export_text()


def test_a_stage_that_fails_is_named_with_its_remedy_and_its_folder_kept(cli: Cli, trained: Any) -> None:
    trained(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB\nand more"))
    code, text = shown(config_of(cli))
    assert code == 1
    line = next(line for line in text.splitlines() if line.strip().startswith("build the drafter"))
    assert "FAILED: CUDA out of memory" in line
    assert "lower data.token_budget" in text
    assert "export" not in stage_names(text)
    kept = cli.folder / "run" / "dry-run"
    assert str(kept) in text.replace("\n", "")
    assert (kept / "events.jsonl").exists()
    trained(UserError("the run stopped: a batch failed 3 times; give it up"))  # the folder of the last one goes
    code, text = shown(config_of(cli))
    assert code == 1
    assert "a batch failed 3 times" in text


def test_an_export_that_fails_is_a_failed_stage(cli: Cli, trained: Any) -> None:
    trained()  # no checkpoint: nothing to export
    code, text = shown(config_of(cli))
    assert code == 1
    assert next(line for line in text.splitlines() if line.strip().startswith("export")).count("FAILED") == 1
    assert "check the export" not in text


def test_decoding_that_disagrees_is_a_failed_stage(cli: Cli, trained: Any) -> None:
    trained(check={"flagged": True, "blocks": 9, "tau_decoded": 1.0, "tau_training": 2.0})
    code, text = shown(config_of(cli))
    assert code == 1
    assert "decode a prompt" in text
    assert "draft different tokens" in text


def test_an_interrupted_dry_run_returns_its_code_and_leaves_nothing(cli: Cli, trained: Any) -> None:
    trained(130)
    assert shown(config_of(cli))[0] == 130
    assert not (cli.folder / "run").exists()


def test_only_length_folder_and_tracking_differ_from_the_run(cli: Cli) -> None:
    config = config_of(cli, "train.max_minutes=3", "train.accumulation=2", "decode_check_prompts=0")
    config = config.model_copy(update={"tracking": TrackingConfig(wandb=WandbConfig(project="p"))})  # type: ignore[call-arg]
    before, after = (one.model_dump(mode="json") for one in (config, shortened(config)))
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"run_dir", "decode_check_prompts", "train", "tracking"}
    steps = {key: after["train"][key] for key in before["train"] if before["train"][key] != after["train"][key]}
    assert steps == {"max_steps": 2, "max_minutes": None, "log_every": 2}


def test_times_of_stages_are_those_of_the_record(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows = [
        {"time": 10.0, "kind": "phase", "text": "loading"},
        {"time": 11.0, "kind": "phase", "text": "loading", "worker": "target-0"},
        {"time": 14.0, "kind": "phase", "text": "training"},
        {"time": 19.0, "kind": "checkpoint", "text": "step 2", "seconds": 1.5},
        {"time": 20.0, "kind": "phase", "text": "checking"},
        {"time": 22.0, "kind": "phase", "text": "failed: no"},
    ]
    folder.events.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.status.write_text('{"step": 1}')
    stages = read_stages(folder, 8.0, 23.0)
    assert [(stage.name, stage.seconds) for stage in stages] == [
        ("settle what the run is", 2.0),
        ("load the target", 4.0),
        ("train", 4.5),
        ("save", 1.5),
        ("decode a prompt", 2.0),
    ]
    assert stages[2].found == "1 step on real data"


def test_errors_come_with_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_words(OSError(errno.ENOSPC, "No space left on device"))[1] == "free space on the disk of run_dir"
    assert in_words(ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib"))[1] == (
        "pip install matplotlib"
    )
    assert capsys.readouterr().err == ""
    assert in_words(KeyError("x"))[0] == "KeyError: 'x'"
    assert "KeyError" in capsys.readouterr().err


def test_peaks_hold_the_most_and_ask_for_the_gpus_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status.json"
    peaks = Peaks(status)
    peaks.sample()  # no status yet
    first = peaks.host_bytes
    assert first > 50e6
    status.write_text(json.dumps({"workers": {"a": {"device": "cuda:1"}, "b": {"device": "cpu"}}}))
    used = iter([5 * 10**9, 3 * 10**9])
    monkeypatch.setattr(peaks, "_read", lambda device: (next(used), 8 * 10**9))
    ballast = torch.ones(30_000_000)
    peaks.sample()
    assert peaks.host_bytes > first + 4 * ballast.numel() / 2
    del ballast
    peaks.sample()
    assert peaks.host_bytes > first
    assert peaks.gpus == {"cuda:1": (5 * 10**9, 8 * 10**9)}
    assert list(memory_lines(peaks))[1] == "peak memory: cuda:1 5.00 of 8.00 GB, whoever uses it"
    blind = Peaks(status)
    monkeypatch.setattr(blind, "_read", lambda device: (None, None))
    blind.sample()
    assert "nvidia-ml-py" in list(memory_lines(blind))[-1]


def test_a_dry_run_is_judged_by_its_stages(tmp_path: Path) -> None:
    done = DryRun(RunFolder(tmp_path))
    done.stage("one", lambda: "fine")

    def fails() -> str:
        raise UserError("no; do this")

    done.stage("two", fails)
    done.stage("three", lambda: "never")
    assert [(stage.name, stage.found, stage.failed) for stage in done.stages] == [
        ("one", "fine", None), ("two", "", "no; do this")
    ]  # fmt: skip
    assert done.failed
