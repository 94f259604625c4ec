"""What runs on a CUDA device is what runs on the CPU. Skipped without one; needs neither data sets nor a download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from draftmill.drafter import attention
from draftmill.drafter.config import FULL, SLIDING, DrafterSpec
from draftmill.drafter.model import Drafter, initialise
from draftmill.drafter.objective import block_loss
from draftmill.evaluate.decode import decode
from draftmill.evaluate.plain import plain
from draftmill.handoff.memory import MemoryRing
from draftmill.records import PADDING_DOCUMENT, HiddenBatch, TokenBatch
from draftmill.run.sources import InlineSource
from draftmill.run.states import States
from draftmill.target.capture import Target
from draftmill.target.config import TargetConfig
from draftmill.target.reuse import ReusedStates
from draftmill.train.checkpoint import find_latest, load_drafter, optimizer_tensors
from draftmill.train.config import TrainConfig
from draftmill.train.parallel import Alone
from draftmill.train.step import StepSettings, batch_blocks, micro_step
from draftmill.train.trainer import Trainer

pytestmark = pytest.mark.gpu

VOCAB, HIDDEN, LAYERS, MASK = 320, 64, 4, 319
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LINEAR = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
SPEC = DrafterSpec(
    hidden_size=HIDDEN, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    rms_norm_eps=1e-6, rope_theta=10000.0, block_size=8, mask_token_id=MASK, taps=(1, 3), layer_types=(FULL, SLIDING),
    layer_causal=(False, True), sliding_window=16, vocab_size=VOCAB, num_target_layers=LAYERS,
    max_position_embeddings=512,
)  # fmt: skip
SETTINGS = StepSettings(anchors=48, gamma=4.0, seed=0, dtype=torch.float32)
LENGTHS, BUDGET = [31, 1, 60, 17], 128


@pytest.fixture(scope="module", autouse=True)
def exact_matrix_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hybrid")
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **LINEAR)).save_pretrained(folder)
    return folder


def batch_of(lengths: list[int], *, supervised: bool = True, index: int = 0, seed: int = 0) -> TokenBatch:
    """Random documents, answered from their fourth token on."""
    total, padding = sum(lengths), BUDGET - sum(lengths)
    draw = torch.Generator().manual_seed(seed)
    pad = torch.zeros(padding, dtype=torch.int32)
    places = torch.cat([*(torch.arange(length, dtype=torch.int32) for length in lengths), pad])
    numbers = [torch.full((length,), d, dtype=torch.int32) for d, length in enumerate(lengths)]
    documents = torch.cat([*numbers, torch.full((padding,), PADDING_DOCUMENT, dtype=torch.int32)])
    return TokenBatch(
        input_ids=torch.cat([torch.randint(2, MASK, (total,), generator=draw, dtype=torch.int32), pad]),
        loss_mask=(places >= 3) & (documents >= 0) & supervised,
        position_ids=places,
        document_ids=documents,
        documents=tuple(range(len(lengths))),
        index=index,
        bin=index,
        epoch=0,
    )


def gap(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double().cpu(), wanted.detach().double().cpu()
    return float((got - wanted).norm() / wanted.norm())


def captured(folder: Path, device: str, batch: TokenBatch, **options: Any) -> tuple[Tensor, Target]:
    target = Target(TargetConfig(model=str(folder), **options), SPEC.taps, device=device)
    features = torch.full((BUDGET, target.features_width), torch.nan, dtype=target.dtype, device=device)
    target.capture(batch, features)
    return features, target


def make_drafter(device: str, spec: DrafterSpec = SPEC, std: float = 0.1) -> Drafter:
    drafter = Drafter(spec)
    initialise(drafter, 0, std)
    return drafter.to(device)


def matrix() -> Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.3


def hidden_batch(device: str, lengths: list[int] = LENGTHS, **options: Any) -> HiddenBatch:
    features = torch.randn(BUDGET, 2 * HIDDEN, generator=torch.Generator().manual_seed(2))
    return HiddenBatch(batch_of(lengths, **options), features.to(device), "cafe", SPEC.taps)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_features_are_those_of_the_cpu(llama: Path, dtype: str, most: float) -> None:
    batch = batch_of(LENGTHS)
    there, target = captured(llama, "cuda", batch, dtype=dtype)
    here, own = captured(llama, "cpu", batch, dtype=dtype)
    assert there.device.type == "cuda"
    assert (target.isolation, target.fingerprint) == (own.isolation, own.fingerprint)
    for token in range(batch.tokens):
        assert gap(there[token], here[token]) < 2 * most
    assert gap(there, here) < most
    assert not there[batch.tokens :].any()
    again = torch.full_like(there, torch.nan)
    target.capture(batch, again)
    assert torch.equal(again, there)


def test_a_hybrids_features_are_those_of_the_cpu(hybrid: Path) -> None:
    batch = batch_of(LENGTHS)
    there, target = captured(hybrid, "cuda", batch, dtype="float32")
    assert target.isolation == "rows"
    assert gap(there, captured(hybrid, "cpu", batch, dtype="float32")[0]) < 1e-3


def test_final_hidden_states_are_those_of_the_cpu(llama: Path) -> None:
    batch, finals = batch_of(LENGTHS), []
    for device in ("cuda", "cpu"):
        target = captured(llama, device, batch, dtype="float32")[1]
        finals.append(torch.full((BUDGET, HIDDEN), torch.nan, device=device))
        target.capture_final(batch, finals[-1])
    assert gap(*finals) < 1e-5


def dense_step(drafter: Drafter, batch: HiddenBatch, table: Tensor, settings: StepSettings) -> Tensor:
    """A micro-step with the reference mask over everything, padding anchors and all. Returns the loss."""
    device = batch.features.device
    blocks = batch_blocks(batch, drafter, settings).to(device)
    documents, places = (t.to(device) for t in (batch.tokens.document_ids, batch.tokens.position_ids))
    loss, _ = block_loss(
        drafter, batch.features.to(settings.dtype), places, blocks, embedding=table, head=table,
        attend=attention.dense(drafter.spec, blocks, documents, places), chunk_rows=64,
    )  # fmt: skip
    loss.backward()
    return loss.detach()


def plain_step(drafter: Drafter, batch: HiddenBatch, table: Tensor, settings: StepSettings) -> Tensor:
    return micro_step(drafter, batch, embedding=table, head=table, settings=settings).totals[0]


@pytest.mark.parametrize("step", [dense_step, plain_step])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("anchors", [48, 300])  # 300: more than there are
def test_loss_and_gradients_are_those_of_the_cpu(
    step: Callable[..., Tensor], dtype: torch.dtype, most: float, anchors: int
) -> None:
    settings = replace(SETTINGS, dtype=dtype, anchors=anchors)
    there, here = make_drafter("cuda"), make_drafter("cpu")
    loss = step(there, hidden_batch("cuda"), matrix().to("cuda", dtype), settings)
    wanted = plain_step(here, hidden_batch("cpu"), matrix(), replace(settings, dtype=torch.float32))
    assert abs(float(loss) / float(wanted) - 1) < most
    for name, parameter in here.named_parameters():
        got = there.get_parameter(name).grad
        assert got.dtype == torch.float32
        assert gap(got, parameter.grad) < most * (1 if dtype == torch.float32 else 3), name


def test_metric_sums_are_those_of_the_cpu() -> None:
    sums = [
        micro_step(make_drafter(d), hidden_batch(d), embedding=matrix().to(d), head=matrix().to(d), settings=SETTINGS)
        for d in ("cuda", "cpu")
    ]
    assert gap(sums[0].totals, sums[1].totals) < 1e-4
    torch.testing.assert_close(sums[0].slots[0].cpu(), sums[1].slots[0])  # counts of labels


class Plan:
    """Two bins, the second of which has nothing to train."""

    def __init__(self, seen: list[int] | None = None) -> None:
        self.seen = [] if seen is None else seen

    def batch(self, index: int) -> TokenBatch:
        self.seen.append(index)
        place = index % 2
        return replace(batch_of(LENGTHS, supervised=place == 0, seed=place, index=place), index=index)


def inline_source(plan: Any, target: Target, reuse: ReusedStates) -> InlineSource:
    ring = MemoryRing(1, BUDGET, target.features_width, dtype=target.dtype, device="cuda")
    return InlineSource(plan, States(target, reuse), ring, may_take=lambda _: True, on_release=lambda _: None)


def trainer_on_cuda(llama: Path, folder: Path, steps: int, logs: list[dict[str, Any]], **options: Any) -> Trainer:
    target = Target(TargetConfig(model=str(llama)), SPEC.taps, device="cuda")
    wanted: dict[str, Any] = {
        "drafter": make_drafter("cuda", std=0.02),
        "source": inline_source(Plan(), target, ReusedStates(10**9)),
        "config": TrainConfig(lr=3e-3, log_every=5, accumulation=1),
        "parallel": Alone(),
    }
    return Trainer(
        settings=replace(SETTINGS, dtype=torch.bfloat16), total_steps=steps, embedding=target.embedding,
        head=target.head, folder=folder, on_log=logs.append, on_save=lambda _: None, provenance={},
        **(wanted | options),
    )  # fmt: skip


class Supervised(Plan):
    def batch(self, index: int) -> TokenBatch:
        return replace(super().batch(2 * index), index=index)


def supervised_source(llama: Path) -> InlineSource:
    target = Target(TargetConfig(model=str(llama)), SPEC.taps, device="cuda")
    return inline_source(Supervised(), target, ReusedStates(0))


def test_a_short_training_run_lowers_the_loss(llama: Path, tmp_path: Path) -> None:
    logs: list[dict[str, Any]] = []
    trainer = trainer_on_cuda(llama, tmp_path, 200, logs, source=supervised_source(llama))
    assert trainer.run()
    assert trainer.progress.count()["skipped"] == 0
    assert logs[-1]["loss"] < 0.6 * logs[0]["loss"]
    assert all(parameter.dtype == torch.float32 for parameter in trainer.parameters)
    checkpoint, rejected = find_latest(tmp_path)
    assert (checkpoint.step, rejected) == (200, [])
    saved = load_drafter(checkpoint).state_dict()
    assert all(torch.equal(saved[name], value.cpu()) for name, value in trainer.drafter.state_dict().items())


def test_case_24_a_batch_without_valid_anchor_is_no_error_on_the_device(llama: Path, tmp_path: Path) -> None:
    logs: list[dict[str, Any]] = []
    config = TrainConfig(lr=3e-3, log_every=1, accumulation=2)
    trainer = trainer_on_cuda(llama, tmp_path, 3, logs, config=config)
    assert trainer.run()
    assert [line["blocks"] for line in logs] == [48.0, 48.0, 48.0]


def test_case_34_a_run_can_be_resumed_on_the_device(llama: Path, tmp_path: Path) -> None:
    logs: list[dict[str, Any]] = []
    source = supervised_source(llama)
    source._may_take = lambda index: index < 12  # one batch a step: the run is ended after 12
    first = trainer_on_cuda(llama, tmp_path, 20, logs, source=source)
    first.run()
    source._may_take = lambda _: True
    checkpoint, _ = find_latest(tmp_path)
    assert checkpoint is not None
    second = trainer_on_cuda(
        llama, tmp_path, 20, logs, source=source, drafter=load_drafter(checkpoint).to("cuda")
    )  # fmt: skip
    second.resume(checkpoint)
    moments, saved = optimizer_tensors(second.optimizer), optimizer_tensors(first.optimizer)
    assert moments.keys() == saved.keys()
    assert all(torch.equal(moments[name].cpu(), value.cpu()) for name, value in saved.items())
    assert second.run()
    assert second.progress.step == 20
    assert [line["step"] for line in logs] == [5, 10, 15, 20]
    assert [line["averaged_steps"] for line in logs] == [5, 5, 5, 5]
    assert logs[-1]["loss"] < logs[0]["loss"]


def clean(model: nn.Module) -> nn.Module:
    return model.to("cuda").eval().requires_grad_(False)


@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_speculative_decoding_in_float32_is_lossless(name: str, request: pytest.FixtureRequest) -> None:
    kinds = {"llama": LlamaForCausalLM, "hybrid": Qwen3_5ForCausalLM}
    folder = request.getfixturevalue(name)
    model = clean(kinds[name].from_pretrained(folder, dtype=torch.float32))
    drafter = make_drafter("cuda").eval()
    drawn = torch.Generator().manual_seed(5)
    for length in (1, 9, 33):
        prompt = torch.randint(2, MASK, (length,), generator=drawn).to("cuda")
        wanted = plain(model, prompt, max_new_tokens=40)
        got = decode(model, drafter, prompt, max_new_tokens=40)
        assert len(wanted.tokens) == 40
        assert tuple(got.tokens) == tuple(wanted.tokens)
        assert sum(block.produced for block in got.blocks) == 39
