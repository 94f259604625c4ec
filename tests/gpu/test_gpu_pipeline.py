"""The queues of a GPU and whole runs of several processes on one. Skipped without CUDA; needs no download."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

pytestmark = pytest.mark.gpu

SHAPE_NUMBERS = (1, 4, 4096, 640)  # ranks, slots, tokens, width: 5 MB a slot


def ring_shape() -> Any:
    from draftmill.handoff.shared import RingShape

    return RingShape(*SHAPE_NUMBERS, torch.bfloat16)


def carried(writer: Any, reader: Any, rounds: int) -> int:
    """How many of `rounds` batches arrive bit for bit, although both sides compute meanwhile and buffers are reused."""
    busy = torch.randn(2048, 2048, device="cuda")
    moving: dict[int, tuple[torch.Tensor, Any]] = {}
    arrived = 0
    for number in range(rounds):
        slot = number % reader.slots
        if slot in moving:
            arrived += is_equal(reader, slot, *moving.pop(slot))
        wanted = torch.randn(SHAPE_NUMBERS[2:], device="cuda").bfloat16()
        into = writer.begin(slot)
        for _ in range(4):
            busy = busy @ busy / 50  # the write comes late on the compute stream
        into.copy_(wanted)
        moving[slot] = wanted, writer.end(slot)
    return arrived + sum(is_equal(reader, slot, *left) for slot, left in moving.items())


def is_equal(reader: Any, slot: int, wanted: torch.Tensor, transfer: Any) -> bool:
    transfer.wait()
    reader.fetch(slot)
    features = reader.features(slot)
    equal = features.device.type == "cuda" and torch.equal(features.view(torch.uint8), wanted.view(torch.uint8))
    reader.done(slot).wait()
    return equal


def test_slots_in_pinned_host_memory_carry_bits() -> None:
    from draftmill.handoff.shared import SharedRing, shared_reader, shared_writers

    ring = SharedRing(ring_shape())
    assert carried(shared_writers(ring, "cuda:0")[0], shared_reader(ring, 0, "cuda:0"), rounds=40) == 40


def test_a_prefetched_slot_waits_for_a_free_buffer_and_keeps_its_order() -> None:
    from draftmill.handoff.shared import SharedRing, shared_reader

    ring = SharedRing(ring_shape())
    reader = shared_reader(ring, 0, "cuda:0")
    for slot in range(4):
        ring.slot(0, slot).fill_(slot + 1)
        reader.fetch(slot)
    for slot in range(4):
        assert (reader.features(slot) == slot + 1).all()
        transfer = reader.done(slot)
        transfer.wait()
        assert transfer.ready()


def test_a_ring_that_is_gone_leaves_its_addresses_free_for_the_next() -> None:
    from draftmill.handoff.shared import SharedRing, shared_writers

    for _ in range(4):  # the same addresses are mapped again and again
        ring = SharedRing(ring_shape())
        writers = shared_writers(ring, "cuda:0")
        writers[0].begin(0).fill_(1)
        writers[0].end(0).wait()
        assert (ring.slot(0, 0) == 1).all()


def _write_elsewhere(handle: bytes, done: Any) -> None:
    from draftmill.handoff.device import DeviceRingWriters

    writers = DeviceRingWriters((handle,), ring_shape(), "cuda:0")
    for slot in range(4):
        into = writers.writers[0].begin(slot)
        into.copy_(torch.arange(into.numel(), device="cuda").view_as(into) % 251 + slot)
        writers.writers[0].end(slot).wait()
    writers.close()
    done.put(True)


def test_another_process_writes_into_slots_on_the_device_and_nothing_is_left_in_dev_shm() -> None:
    from draftmill.handoff.device import DeviceRing

    before = set(os.listdir("/dev/shm"))  # noqa: PTH208
    ring = DeviceRing(ring_shape(), "cuda:0")
    context = multiprocessing.get_context("spawn")
    done = context.SimpleQueue()
    process = context.Process(target=_write_elsewhere, args=(ring.handle, done))
    process.start()
    assert done.get()
    process.join()
    for slot in range(4):
        features = ring.features(slot)
        wanted = (torch.arange(features.numel(), device="cuda").view_as(features) % 251 + slot).bfloat16()
        assert torch.equal(features, wanted)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "torch" in name or "draftmill" in name}  # noqa: PTH208


@pytest.fixture(scope="module")
def run_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target (its tokenizer knows bytes), a prepared set and a config."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from draftmill.data.config import PrepareConfig
    from draftmill.data.prepare import prepare

    folder = tmp_path_factory.mktemp("gpu-run")
    vocabulary = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|s|>", "<|e|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|e|>")
    fast.chat_template = (
        "{% for m in messages %}{{ '<|s|>' + m['role'] + ':' + m['content'] + '<|e|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|s|>assistant:' }}{% endif %}"
    )
    fast.save_pretrained(folder / "target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, eos_token_id=257,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "target")
    answers = [f"{n} is it. " * (n % 9 + 2) for n in range(80)]
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": answer}]}
        for n, answer in enumerate(answers)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = str(folder / "target")
    prepare(PrepareConfig(inputs=[folder / "chat.jsonl"], output=folder / "set", model=model, workers=1))
    values = {
        "run_dir": str(folder / "run"), "decode_check_prompts": 2,
        "data": {"prepared": str(folder / "set"), "token_budget": 512}, "target": {"model": model},
        "drafter": {"layers": 2, "block_size": 4},
        "train": {"epochs": 100, "max_steps": 60, "anchors": 64, "log_every": 10, "save_every": 20, "lr": 0.003},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder


def start(folder: Path, name: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "draftmill", "train", str(folder / "config.yaml"), f"run_dir={folder / name}"]
    return subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def finish(process: subprocess.Popen[str]) -> str:
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 0, error
    return error


@pytest.fixture(scope="module")
def inline_losses(run_files: Path) -> list[float]:
    finish(start(run_files, "inline"))
    found = losses(run_files / "inline")
    assert len(found) == 6
    assert found[-1] < found[0] - 0.2
    return found


@pytest.mark.parametrize("queue", ["host", "device"])
def test_a_split_run_trains_what_an_inline_run_trains(run_files: Path, inline_losses: list[float], queue: str) -> None:
    from draftmill.run.ledger import read_ledger

    error = finish(
        start(run_files, queue, "devices.targets=0", "devices.drafters=0", f"handoff.queue={queue}")
    )  # fmt: skip
    assert "blocks agree" in error
    assert "step: fused, one CUDA graph" in error
    assert losses(run_files / queue) == pytest.approx(inline_losses, rel=0.02)
    assert read_ledger(run_files / queue / "ledger.jsonl") == dict.fromkeys(range(60), 1)


def test_slots_that_do_not_fit_the_device_are_refused_with_the_number_that_would(run_files: Path) -> None:
    process = start(
        run_files, "refused", "devices.targets=0", "devices.drafters=0", "handoff.queue=device", "handoff.slots=2000000"
    )
    error = process.communicate(timeout=300)[1]
    assert process.returncode == 2, error
    assert "of the memory of cuda:0" in error
    assert "would fit: set handoff.slots=" in error
    assert "Traceback" not in error


def test_both_sides_are_measured_for_the_automatic_split(run_files: Path) -> None:
    from draftmill.config import load_run_config
    from draftmill.run.build import build
    from draftmill.run.split import measure

    config = load_run_config(run_files / "config.yaml", [])
    measured = measure(config, build(config).spec, "cuda:0")
    assert measured.together
    assert 0 < measured.target_seconds < 10
    assert 0 < measured.drafter_seconds < 10


@pytest.mark.parametrize("victim", ["target-0", "drafter-0"])
def test_killed_workers_are_replaced_with_slots_on_the_device(
    run_files: Path, inline_losses: list[float], victim: str
) -> None:
    from draftmill.run.ledger import read_ledger

    name = f"kill-{victim}"
    process = start(run_files, name, "devices.targets=0", "devices.drafters=0", "handoff.queue=device")
    folder = run_files / name
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len(losses(folder)) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    os.kill(json.loads((folder / "status.json").read_text())["workers"][victim]["pid"], signal.SIGKILL)
    finish(process)
    assert losses(folder) == pytest.approx(inline_losses, rel=0.02)
    assert read_ledger(folder / "ledger.jsonl") == dict.fromkeys(range(60), 1)
    assert json.loads((folder / "status.json").read_text())["restarts"] >= 1
