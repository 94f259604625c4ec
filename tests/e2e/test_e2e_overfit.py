"""The whole way on the real SmolLM2, in small: a drafter that has learned eight conversations by heart must, decoding
for real, be accepted nearly block by block, and training and decoding must agree slot by slot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from draftmill.config import load_run_config
from draftmill.data.config import PrepareConfig
from draftmill.data.prepare import prepare
from draftmill.data.tokenizer import ChatTokenizer
from draftmill.evaluate.agreement import agreement
from draftmill.evaluate.config import EvaluateConfig
from draftmill.evaluate.plain import plain
from draftmill.run.evaluate import check_run_export, evaluate_run, export_run
from draftmill.run.train import train
from draftmill.target.config import TargetConfig
from draftmill.target.model import load_causal_lm
from draftmill.train.checkpoint import load_drafter, open_checkpoint

pytestmark = pytest.mark.slow

QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write a Python function that adds two numbers.",
    "What do bees make?",
    "Say hello to my friend Ann.",
    "How many days has a week?",
    "What is the opposite of hot?",
    "Name a fruit that is yellow.",
]


@pytest.fixture(scope="module")
def overfit(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(run folder, conversations): float32 throughout, so that answers do not depend on the batch shape."""
    folder = tmp_path_factory.mktemp("overfit")
    chat = ChatTokenizer(str(smollm2), {})
    model = load_causal_lm(TargetConfig(model=str(smollm2), dtype="float32"), device="cpu")
    rows = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = torch.tensor(chat.encode([chat.render_prompt(messages, None)])[0].ids)
        answer = plain(model, prompt, max_new_tokens=32, stop_ids={2}).tokens
        text = chat.tokenizer.decode([token for token in answer if token != 2])
        rows.append({"messages": [*messages, {"role": "assistant", "content": text}], "finished": answer[-1] == 2})
    conversations = folder / "conversations.jsonl"
    conversations.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(PrepareConfig(inputs=[conversations], output=folder / "set", model=str(smollm2), workers=1))
    config = {
        "run_dir": str(folder / "run"),
        "threads": 1,
        "data": {"prepared": str(folder / "set"), "token_budget": 512},
        "target": {"model": str(smollm2), "dtype": "float32", "reuse_states_gb": 1},
        "drafter": {"layers": 2, "block_size": 8, "mask_token_id": 7},
        "train": {"epochs": 1000, "max_steps": 110, "anchors": 96, "lr": 1e-3, "log_every": 10, "dtype": "bfloat16"},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    assert train(load_run_config(path, []), resume=False) == 0
    return folder / "run", conversations


def test_overfit_training_accuracy_becomes_accepted_blocks(overfit: tuple[Path, Path], smollm2: Path) -> None:
    run, conversations = overfit
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["accuracy"] > 0.95
    config = EvaluateConfig(prompts=conversations, max_new_tokens=32)
    done = evaluate_run(run, config, target=None, template_kwargs=None, device="cpu", progress=None)
    overall = done.result.overall
    assert overall.identical == overall.prompts == len(QUESTIONS)
    assert all(share is None or share > 0.9 for share in overall.acceptance.slots)
    status = json.loads((run / "status.json").read_text())
    assert status["decode_check"]["blocks_agree"] == 1.0
    assert done.json_path is not None
    assert json.loads(done.json_path.read_text())["slices"][0]["acceptance"]["tau"] > 4
    assert (run / "report.png").stat().st_size > 10_000


def test_training_and_decoding_agree_slot_by_slot(overfit: tuple[Path, Path], smollm2: Path) -> None:
    run, _ = overfit
    model = load_causal_lm(TargetConfig(model=str(smollm2), dtype="float32"), device="cpu")
    chat = ChatTokenizer(str(smollm2), {})
    drafter = load_drafter(open_checkpoint(run))
    texts = [chat.render_prompt([{"role": "user", "content": question}], None) for question in QUESTIONS]
    prompts = [torch.tensor(encoding.ids) for encoding in chat.encode(texts)]
    result = agreement(model, drafter, prompts, 32, stop_ids=frozenset({2}))
    assert result.blocks_agree == 1.0
    assert result.proposals_agree == 1.0
    assert result.tau_decoded == result.tau_training
    assert not result.flagged


def test_case_37_the_export_is_the_trained_drafter(overfit: tuple[Path, Path], tmp_path: Path) -> None:
    run, _ = overfit
    folder, drafter = export_run(run, tmp_path / "export", dtype="bfloat16", overwrite=False)
    report = check_run_export(run, folder)
    assert report.tensors == len(drafter.state_dict()) == 25
    assert report.output_gap == 0.0
    config = json.loads((folder / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [1, 27]
    assert config["dtype"] == "bfloat16"
    if report.referee_gap is not None:
        assert report.referee_gap < 1e-3
