"""The fused step in the loop on a GPU: nothing waits, nothing grows, memory as estimated, the plain losses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmill.drafter.config import FULL, SLIDING, DrafterSpec
from draftmill.drafter.memory import Fp8Use
from draftmill.drafter.model import Drafter, initialise
from draftmill.records import HiddenBatch, TokenBatch
from draftmill.train.config import TrainConfig
from draftmill.train.parallel import Alone
from draftmill.train.step import StepSettings
from draftmill.train.trainer import Trainer

pytestmark = pytest.mark.gpu
needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs fp8 tensor cores"
)

SPEC = DrafterSpec(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    rms_norm_eps=1e-6, rope_theta=10000.0, block_size=8, mask_token_id=511, taps=(0, 2), layer_types=(SLIDING, FULL),
    layer_causal=(True, False), sliding_window=64, vocab_size=512, num_target_layers=4, max_position_embeddings=1024,
)  # fmt: skip
TOKENS, DOCUMENT = 2048, 128
SETTINGS = StepSettings(anchors=256, gamma=4.0, seed=0, dtype=torch.bfloat16, fused_rows=TOKENS)


def matrix() -> torch.Tensor:
    return torch.randn(SPEC.vocab_size, SPEC.hidden_size, generator=torch.Generator().manual_seed(1)).cuda() * 0.1


class Source:
    """Text that counts upwards, so that there is something to learn; features that say where it stands."""

    def __init__(self) -> None:
        self.table = torch.randn(SPEC.vocab_size, 2 * SPEC.hidden_size, generator=torch.Generator().manual_seed(2))
        self.batches = [self.make(number) for number in range(4)]

    def make(self, number: int) -> HiddenBatch:
        place = torch.arange(TOKENS, dtype=torch.int32)
        ids = (place % DOCUMENT * 3 + place // DOCUMENT * 7 + number) % 500
        tokens = TokenBatch(
            ids.int(), torch.ones(TOKENS, dtype=torch.bool), place % DOCUMENT, place // DOCUMENT,
            tuple(range(TOKENS // DOCUMENT)), number, number, 0,
        )  # fmt: skip
        return HiddenBatch(tokens, self.table[ids.long()].bfloat16().cuda(), "cafe", SPEC.taps)

    def take(self, index: int) -> HiddenBatch:
        batch = self.batches[index % 4]
        return replace(batch, tokens=replace(batch.tokens, index=index, bin=index))

    def release(self, index: int) -> None:
        pass


def make_trainer(folder: Path, settings: StepSettings, steps: int, lines: list[dict[str, Any]], **more: Any) -> Trainer:
    drafter = Drafter(SPEC)
    initialise(drafter, 0)
    config = TrainConfig(lr=3e-3, log_every=more.pop("log_every", 10), save_every=1000, **more)
    table = matrix()
    return Trainer(
        drafter.cuda(), Source(), config, parallel=Alone(), settings=settings, total_steps=steps, embedding=table,
        head=table, folder=folder, on_log=lines.append, on_save=lambda _: None, provenance={},
    )  # fmt: skip


USES = ["none", pytest.param("head", marks=needs_fp8), pytest.param("all", marks=needs_fp8)]


@pytest.mark.parametrize("fp8", USES)
@pytest.mark.parametrize("graph", [True, False])
def test_the_steady_loop_never_waits_and_takes_no_new_memory(
    tmp_path: Path, graph: bool, fp8: Fp8Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not graph:
        monkeypatch.setattr("draftmill.train.fused_step.uses_graph", lambda spec: False)
    settings = replace(SETTINGS, fp8=fp8)
    trainer = make_trainer(tmp_path, settings, 1000, [], log_every=500, accumulation=2)
    assert ("graph" in trainer.step.describe()) == graph
    assert ("fp8" in trainer.step.describe()) == (fp8 != "none")

    def step() -> None:
        summed = trainer._accumulate()
        assert summed is not None
        trainer._update(*summed)

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(12):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved
    assert trainer.progress.count()["skipped"] == 0
    assert trainer.progress.count()["context_tokens"] == 16 * 2 * TOKENS


def test_it_learns_as_the_plain_step_does(tmp_path: Path) -> None:
    losses = {}
    for name, settings in (("fused", SETTINGS), ("plain", replace(SETTINGS, fused_rows=None))):
        lines: list[dict[str, Any]] = []
        make_trainer(tmp_path / name, settings, 60, lines).run()
        losses[name] = [line["loss"] for line in lines]
    assert losses["fused"] == pytest.approx(losses["plain"], rel=0.02)
    assert losses["fused"][-1] < losses["fused"][0] / 2


def test_ten_bad_updates_end_the_run_although_nothing_waits_for_them(tmp_path: Path) -> None:
    from draftmill.train.trainer import DivergedError

    trainer = make_trainer(tmp_path, SETTINGS, 500, [])
    for batch in trainer.source.batches:  # type: ignore[attr-defined]
        batch.features.fill_(math.nan)
    with pytest.raises(DivergedError, match="10 updates in a row"):
        trainer.run()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_both_optimizers_lower_the_loss(tmp_path: Path, optimizer: str) -> None:
    lines: list[dict[str, Any]] = []
    make_trainer(tmp_path, SETTINGS, 60, lines, optimizer=optimizer).run()
    assert lines[-1]["loss"] < lines[0]["loss"] / 2


@needs_fp8
def test_it_learns_in_fp8_as_in_bf16(tmp_path: Path) -> None:
    losses = {}
    for fp8 in ("none", "head", "all"):
        lines: list[dict[str, Any]] = []
        make_trainer(tmp_path / fp8, replace(SETTINGS, fp8=fp8), 60, lines).run()
        losses[fp8] = [line["loss"] for line in lines]
    print(losses)
    for fp8 in ("head", "all"):  # rounding leads elsewhere; it must not lead to a worse place
        assert losses[fp8][0] == pytest.approx(losses["none"][0], rel=0.03)
        assert losses[fp8][-1] < 1.05 * losses["none"][-1] + 0.02


@pytest.mark.parametrize("fp8", USES)
@pytest.mark.parametrize("groups", [1, 4])
def test_memory_is_what_was_estimated(groups: int, fp8: Fp8Use) -> None:
    from draftmill.drafter.memory import estimate, parameters
    from draftmill.train.fused_step import FusedStep

    spec = replace(SPEC, hidden_size=2560, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
                   head_dim=128, vocab_size=64000, block_size=16)  # fmt: skip
    settings = replace(SETTINGS, anchors=1024, fused_rows=8192, fp8=fp8)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        drafter = Drafter(spec)
        embedding, head = (torch.zeros(64000, 2560, dtype=torch.bfloat16) for _ in range(2))
    FusedStep(drafter, embedding, head, settings, groups=groups, graph=False).prepare()
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    memory = estimate(spec, context_rows=8192, anchors=1024, groups=groups, tied=False, graph=False, fp8=fp8)
    estimated = memory.total - 8 * parameters(spec)  # no optimizer here
    assert measured == pytest.approx(estimated, rel=0.1)
