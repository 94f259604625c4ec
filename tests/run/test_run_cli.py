"""The commands as a user meets them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from run_helpers import Cli, wait_for
from transformers import AutoTokenizer, GenerationConfig

from draftmill.run import regenerate
from draftmill.target.generate import Answer

COMMANDS = ["prepare", "regenerate", "plan", "doctor", "train", "evaluate", "export", "status", "watch",
            "profile", "report"]  # fmt: skip


def draftmill(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "draftmill", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        "import sys, draftmill.cli\n"
        f"try: draftmill.cli.app(['{command}', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 300


def test_help_answers_at_once() -> None:
    times = []
    for _ in range(3):
        started = time.monotonic()
        assert draftmill("--help").returncode == 0
        times.append(time.monotonic() - started)
    assert min(times) < 0.5 * max(1.0, os.getloadavg()[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["status", "nowhere"], "nowhere holds no run"),
        (["export", "nowhere"], "nowhere does not exist"),
        (["prepare", "nowhere.jsonl", "--model", "m"], "nowhere.jsonl is not a file"),
        (["prepare", "x.jsonl", "--model", "m", "--template", "nonsense"], "KEY=VALUE"),
        (["prepare", "x.jsonl", "--model", "m", "--turns", "some"], "turns"),
        (["evaluate", "nowhere", "--prompts", "p.jsonl", "--dtype", "int8"], "dtype"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    done = draftmill(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_regenerate_asks_each_question_after_the_answers_given_before(
    tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [("user", "First?"), ("assistant", "old"), ("user", "Second?"), ("assistant", "older")]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"conversations": [{"from": role, "value": text} for role, text in turns]}) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    asked: list[str] = []

    def answer(_model: object, prompts: list[list[int]], **_: object) -> list[Answer]:
        asked.extend(tokenizer.decode(prompt) for prompt in prompts)
        return [Answer(tokenizer.encode(f"new {len(asked)}"), True)]

    model = torch.nn.Linear(1, 1)
    model.generation_config = GenerationConfig(eos_token_id=2)  # type: ignore[assignment]
    monkeypatch.setattr(regenerate, "load_causal_lm", lambda *_, **__: model)
    monkeypatch.setattr(regenerate, "answer_batch", answer)
    config = regenerate.RegenerateConfig(inputs=[source], output=output, model=str(smollm2))
    done = regenerate.regenerate(config, device="cpu", progress=lambda *_: None)
    (row,) = [json.loads(line) for line in output.read_text().splitlines()]
    assert [m["content"] for m in row["messages"]] == ["First?", "new 1", "Second?", "new 2"]
    assert row["finished"] is True
    assert "new 1<|im_end|>" in asked[1]
    assert asked[1].endswith("<|im_start|>assistant\n")
    assert (done.rows, done.answered, done.dropped, done.unfinished) == (1, 1, 0, 0)


@pytest.mark.slow
def test_regenerate_answers_every_turn_and_goes_on_after_a_kill(cli: Cli, tiny_target: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"Question {n}"}]} for n in range(30)]
    rows[3] = {"messages": [{"role": "user", "content": "One"}, {"role": "assistant", "content": "old"},
                            {"role": "user", "content": "Two"}], "source": "long"}  # fmt: skip
    rows[5] = {"prompt": "A bare prompt"}
    text = [json.dumps(row) for row in rows]
    text[7] = "not json"
    prompts = cli.folder / "prompts.jsonl"
    prompts.write_text("\n".join(text) + "\n")

    def arguments(name: str, *more: str) -> list[str]:
        return ["regenerate", str(prompts), "--model", str(tiny_target), "--output", str(cli.folder / name),
                "--max-new-tokens", "24", "--batch-size", "2", "--temperature", "0.8", *more]  # fmt: skip

    whole = cli.run(*arguments("whole.jsonl"))
    assert whole.returncode == 0, whole.stderr
    assert "rows 30 = answered 29 (0 before) + dropped 1" in whole.stdout
    answers = [json.loads(line) for line in (cli.folder / "whole.jsonl").read_text().splitlines()]
    assert len(answers) == 29
    dropped = [json.loads(line) for line in (cli.folder / "whole.jsonl.dropped.jsonl").read_text().splitlines()]
    assert [(row["row"], row["reason"]) for row in dropped] == [(8, "not_json")]
    long = answers[3]
    assert long["source"] == "long"
    assert [m["role"] for m in long["messages"]] == ["user", "assistant"]  # a cut answer ends the conversation
    assert long["messages"][1]["content"] != "old"
    assert not any(row["finished"] for row in answers)  # a random model does not know how to stop

    output = cli.folder / "killed.jsonl"
    process = cli.start(*arguments("killed.jsonl"))
    wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") >= 6)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with output.open("a") as file:
        file.write('{"id": "prompts.jsonl:torn')  # a line the kill cut short
    resumed = cli.run(*arguments("killed.jsonl"))
    assert resumed.returncode == 0, resumed.stderr
    assert output.read_text() == (cli.folder / "whole.jsonl").read_text()
    assert "(0 before)" not in resumed.stdout

    other = cli.run(*arguments("killed.jsonl", "--seed", "5"))
    assert other.returncode == 2
    assert "other settings (seed)" in other.stderr
