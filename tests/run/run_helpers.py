"""A tiny target on disk and real `draftmill` processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

WORDS = "red blue green apple pear plum runs jumps sings over under near the a one two three".split()  # noqa: SIM905


@pytest.fixture(scope="session")
def tiny_target(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 6 layers with SmolLM2's tokenizer and one embedding row to spare."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49153, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny-target")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    rows = []
    for n in range(60):
        answer = " ".join(WORDS[(n * 7 + k * 3) % len(WORDS)] for k in range(10 + n % 25))
        rows.append({"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": answer}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def prepared(tiny_target: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from draftmill.data.config import PrepareConfig
    from draftmill.data.prepare import prepare

    folder = tmp_path_factory.mktemp("prepared") / "set"
    prepare(PrepareConfig(inputs=[conversations], output=folder, model=str(tiny_target), workers=1))
    return folder


@dataclass
class Cli:
    """Runs `draftmill` as its own process."""

    folder: Path
    config: Path

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "draftmill", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options,
        )  # fmt: skip

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def train(self, run_dir: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("train", str(self.config), f"run_dir={self.folder / run_dir}", *arguments)

    def start_train(self, run_dir: str, *arguments: str) -> subprocess.Popen[str]:
        return self.start("train", str(self.config), f"run_dir={self.folder / run_dir}", *arguments)


@pytest.fixture
def cli(tiny_target: Path, prepared: Path, tmp_path: Path) -> Cli:
    config = {
        "run_dir": str(tmp_path / "run"),
        "threads": 1,
        "decode_check_prompts": 0,
        "data": {"prepared": str(prepared), "token_budget": 192},
        "target": {"model": str(tiny_target)},
        "drafter": {"layers": 1, "block_size": 4},
        "train": {"epochs": 100, "max_steps": 24, "anchors": 24, "log_every": 1, "save_every": 5, "lr": 0.003},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return Cli(tmp_path, path)


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Rows without what time decides."""
    path = run / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [{k: v for k, v in row.items() if k not in ("time", "tokens_per_second")} for row in rows]
