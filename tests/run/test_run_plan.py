"""Plans: the arithmetic against other arithmetic and against what was measured, the refusals, the words."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from draftmill.config import load_run_config
from draftmill.data.plan import BatchPlan
from draftmill.data.prepared import PreparedSet
from draftmill.data.tokenizer import load_tokenizer
from draftmill.drafter.memory import estimate, parameters
from draftmill.drafter.model import Drafter
from draftmill.errors import UserError
from draftmill.run import plan_devices as cost
from draftmill.run.plan import Plan, make_plan
from draftmill.run.plan_devices import DEVICES, Sample, TargetCost
from draftmill.run.plan_table import print_plan
from draftmill.run.split import Measured, measure_here
from draftmill.target.shape import load_config
from draftmill.train.checkpoint import optimizer_tensors
from draftmill.train.config import TrainConfig
from draftmill.train.optim import make_optimizer

ROOT = Path(__file__).parents[2]
H200 = DEVICES["h200"]
TOKENS, WIDTH = 192, 2 * 32  # of the small config: a batch, and two taps of a hidden size of 32
Make = Callable[..., Plan]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_drafter_step", ROOT / "bench" / "drafter_step.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for themselves there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> Any:
    return load_tokenizer(str(tiny_target))


@pytest.fixture
def plan(tiny_target: Path, prepared: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A plan of a small config, from a target folder without weights."""
    monkeypatch.setattr("draftmill.run.plan_estimate.load_tokenizer", lambda _: tokenizer)  # half a second each time
    bare = tmp_path / "target"
    shutil.copytree(tiny_target, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "config.yaml"
    values = {
        "run_dir": str(tmp_path / "run"),
        "data": {"prepared": str(prepared), "token_budget": TOKENS},
        "target": {"model": str(bare)},
        "drafter": {"layers": 1, "block_size": 4, "head_dim": 64},
        "train": {"epochs": 3, "anchors": 24, "accumulation": 4},
    }
    path.write_text(yaml.safe_dump(values))

    def make(*overrides: str, device: str = "h200", gpus: int | None = None, measured: bool = False) -> Plan:
        return make_plan(load_run_config(path, list(overrides)), device, gpus, measured=measured)

    return make


def documents(count: int, length: int) -> Sample:
    """A batch of equal documents, all trained."""
    return Sample([[length] * count], [torch.arange(length - 1).repeat(count)])


def cut(device: str, gb: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, device, replace(DEVICES[device], gb=gb))


# --- the drafter's arithmetic -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "anchors"), [(16384, 2048), (4096, 512), (49152, 6144)])
def test_products_are_those_of_the_networks_own_matrices(bench: ModuleType, tokens: int, anchors: int) -> None:
    """Each matrix meets its rows three times: forward, gradient of the rows, gradient of the matrix."""
    for spec in (bench.QWEN_27B, bench.SMOLLM2):
        drafts, total = anchors * spec.block_size, 0.0
        with torch.device("meta"):
            named = dict(Drafter(spec).named_parameters())
        for name, matrix in named.items():
            rows = drafts + (tokens if "k_proj" in name or "v_proj" in name else 0)
            if name == "fc.weight":
                total += 2 * 2 * tokens * matrix.numel()  # what it reads has no gradient
            elif matrix.ndim == 2:
                total += 3 * 2 * rows * matrix.numel()
        total += 2 * 2 * anchors * (spec.block_size - 1) * spec.vocab_size * spec.hidden_size
        assert cost.product_flops(spec, tokens, anchors) == pytest.approx(total, rel=1e-12)


def test_a_plan_needs_nothing_that_only_gpus_have(plan: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is a CPU build there is no triton."""
    for name in [name for name in sys.modules if name.startswith(("triton", "draftmill.drafter.kernels"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("draftmill.train.fused_step", "draftmill.drafter.fused_model", "draftmill.drafter.fused_loss"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    made = plan("devices.targets=[0]", "devices.drafters=[1]")
    assert made.memory[1].groups == 1
    assert made.problems == []


def test_measured_steps_are_met(bench: ModuleType) -> None:
    """docs/log.md, one H200: 796 and 805 ms on two cards; 2,444 ms on the second; 19.6 ms of SmolLM2."""
    big, small = documents(4, 4096), documents(61, 270)
    assert cost.drafter_seconds(bench.QWEN_27B, H200, 16384, 2048, big) == pytest.approx(0.800, rel=0.03)
    assert cost.drafter_seconds(bench.QWEN_27B, H200, 49152, 6144, documents(12, 4096)) == pytest.approx(
        2.444, rel=0.03
    )
    assert cost.drafter_seconds(bench.SMOLLM2, H200, 16384, 4096, small) == pytest.approx(0.0196, rel=0.03)
    for use, seconds in (("head", 0.6825), ("all", 0.5510)):  # on a third card, which took 785 ms without
        took = cost.drafter_seconds(bench.QWEN_27B, H200, 16384, 2048, big, use)
        assert took == pytest.approx(seconds, rel=0.04)
    assert cost.plain_seconds(bench.SMOLLM2, small) == pytest.approx(0.420, rel=0.01)


def test_attention_counts_the_pairs_that_see_each_other(bench: ModuleType) -> None:
    sample = Sample([[5, 3]], [torch.tensor([0, 1, 2, 3, 0, 1])])
    spec = replace(bench.SMOLLM2, layer_types=("full_attention", "sliding_attention"), layer_causal=(False, True),
                   sliding_window=2, block_size=4, num_attention_heads=3, head_dim=8)  # fmt: skip
    full = 4 * (7 / 6) + 4 * 4  # context seen on average from each of 4 slots, and all pairs inside
    sliding = 4 * (6 / 6) + (1 + 2 + 3 + 4)  # 0 1 2 2 0 1
    assert cost.attention_flops(spec, 10, sample) == pytest.approx(10 * (full + sliding) * 3 * 8 * 2 * (2 + 5))


def test_a_slower_device_takes_longer_in_every_part(bench: ModuleType) -> None:
    sample, spec = documents(4, 4096), bench.QWEN_27B
    slow = DEVICES["a100-80"]
    assert slow.tflops == pytest.approx(312 * 665 / 989)
    ratio = cost.drafter_seconds(spec, slow, 16384, 2048, sample) / cost.drafter_seconds(
        spec, H200, 16384, 2048, sample
    )
    assert 3.1 < ratio < 3.2  # 989 / 312 = 3.17 of the arithmetic, 4.8 / 2.04 = 2.35 of memory traffic
    assert cost.update_seconds(spec, slow, "adamw") == pytest.approx(42 * parameters(spec) / 2.04e12)


def test_gradients_go_around_a_ring(bench: ModuleType) -> None:
    size = 4 * parameters(bench.QWEN_27B)
    assert cost.gradient_sum_seconds(bench.QWEN_27B, H200, 1) == 0
    assert cost.gradient_sum_seconds(bench.QWEN_27B, H200, 4) == pytest.approx(1.5 * size / 450e9)
    assert cost.gradient_sum_seconds(bench.QWEN_27B, DEVICES["rtx4090"], 2) == pytest.approx(size / 32e9)


def test_fp8_is_counted_and_said(plan: Make) -> None:
    none, head, all_ = (plan(f"train.fp8={use}") for use in ("none", "head", "all"))
    assert none.seconds["drafter_step"] > head.seconds["drafter_step"] > all_.seconds["drafter_step"]
    assert [any("fp8" in line for line in made.assumptions) for made in (none, head, all_)] == [False, True, True]
    more = [made.memory[-1].total_bytes for made in (none, head, all_)]
    assert more[0] < more[1] <= more[2], "the copies in fp8 take room"


def test_muon_multiplies(bench: ModuleType) -> None:
    spec = replace(bench.SMOLLM2, hidden_size=4, intermediate_size=6, num_attention_heads=1, num_key_value_heads=1,
                   head_dim=2, taps=(0, 1), layer_types=("full_attention",), layer_causal=(False,))  # fmt: skip

    def update(m: int, n: int) -> float:  # X·Xᵀ, its square, and their sum times X
        return 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)

    assert cost.newton_schulz_flops(spec) == 4 * update(2, 4) + 3 * update(4, 6) + update(4, 8)
    adamw, muon = (cost.update_seconds(bench.QWEN_27B, H200, name) for name in ("adamw", "muon"))
    assert muon > 5 * adamw


# --- the target's arithmetic ------------------------------------------------------------------------------------------


def test_a_dense_target_is_counted_from_its_config(smollm2: Path) -> None:
    found = cost.target_cost(load_config(str(smollm2)), 27, trust_remote_code=False)
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
    assert found.active == 28 * layer
    assert found.parameters == 30 * (layer + 2 * 576) + 49152 * 576 + 576
    assert found.width == 576 + 2 * 192 + 576 + 2 * 1536 + 576
    assert (found.windows, found.recurrent, found.tied, found.experts) == ([None] * 28, 0, True, False)
    # docs/log.md: 0.177 s a batch of 16,384 tokens in about 60 documents, bound by launches
    assert cost.target_seconds(found, H200, documents(60, 273), packed=True) == pytest.approx(0.177, rel=0.02)


def test_a_hybrid_target_has_recurrent_layers() -> None:
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
    )  # fmt: skip
    one, two = (cost.target_cost(config, last, trust_remote_code=False) for last in (2, 3))
    assert (one.recurrent, one.windows) == (3, [])
    assert (two.recurrent, two.windows) == (3, [None])
    experts = 2 * 3 * 32 * 16 + 8 * 32 + 3 * 32 * 24 + 32  # two of eight, router, the shared one and its gate
    attention = 32 * 2 * 32 + 2 * 32 * 16 + 32 * 32  # queries with their gate, keys, values, out
    assert two.active - one.active == experts + attention
    assert two.experts
    assert not two.tied


def test_a_large_target_takes_what_its_products_take() -> None:
    large = TargetCost(
        parameters=27_000_000_000, active=24_000_000_000, windows=[None] * 16, recurrent=46, width=90000,
        heads_width=6144, hidden_size=5120, experts=False, tied=False,
    )  # fmt: skip
    seconds = cost.target_seconds(large, H200, documents(4, 4096), packed=False)
    products = 2 * 24e9 * 16384 / (0.75 * 665e12)
    attention = 16 * 4 * 6144 * 4 * (4096 * 4097 / 2) / (0.40 * 665e12)
    assert seconds == pytest.approx(products + attention)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 20])
def test_causal_pairs(window: int | None) -> None:
    pairs = sum(min(place + 1, window or 99) for place in range(7))
    assert cost.causal_pairs(7, window) == pairs


def test_rows_are_padded_to_their_longest_and_packed_documents_are_not() -> None:
    sample = Sample([[3, 10, 4, 9]], [torch.tensor([0])])
    assert sample.as_run(packed=True) == [[(1, 3), (1, 10), (1, 4), (1, 9)]]
    rows = sample.as_run(packed=False)[0]
    assert sum(count for count, _ in rows) == 4
    assert sum(count * length for count, length in rows) > 26


# --- the plan of a run ------------------------------------------------------------------------------------------------


def test_data_and_schedule_are_those_of_the_run(plan: Make, prepared: Path) -> None:
    made, batches = plan(), BatchPlan(PreparedSet.open(prepared), TOKENS, 0)
    assert made.data["batches_per_epoch"] == batches.batches_per_epoch
    assert made.data["tokens_per_epoch"] == PreparedSet.open(prepared).info.tokens
    assert made.schedule["steps"] == 3 * batches.batches_per_epoch // 4
    assert plan("train.max_steps=2").schedule["batches"] == 8


def test_hours_are_batches_times_seconds(plan: Make) -> None:
    made = plan()
    both = made.seconds["target_batch"] + made.seconds["drafter_step"] + made.seconds["update"] / 4
    assert made.chosen.describe() == "1 × inline"
    assert made.time["total_hours"] == pytest.approx(made.schedule["batches"] * both / 3600)
    assert made.time["gpu_hours"] == made.time["total_hours"]
    assert made.time["first_epoch_hours"] == pytest.approx(made.data["batches_per_epoch"] * both / 3600)
    assert made.time["tokens_per_second"] == pytest.approx(
        made.data["tokens_per_epoch"] / made.data["batches_per_epoch"] / both, rel=1e-4
    )


def test_kept_states_save_the_target_from_the_second_epoch_on(plan: Make, tmp_path: Path) -> None:
    without, cached = plan(), plan(f"cache={tmp_path / 'cache'}")
    assert cached.time["first_epoch_hours"] == without.time["first_epoch_hours"]
    drafter = cached.seconds["drafter_batch"] * cached.data["batches_per_epoch"] / 3600
    assert cached.time["later_epoch_hours"] == pytest.approx(drafter)
    states = cached.data["tokens_per_epoch"] * WIDTH * 2
    assert cached.disk["cache_bytes"] == pytest.approx(states + 49153 * 32 * 2, abs=2)  # and the tied embedding
    slot = TOKENS * WIDTH * 2
    part = plan(f"cache={tmp_path / 'cache'}", f"cache_gb={2.5 * slot / 1e9}")
    assert part.disk["cache_share"] == 2 / part.data["batches_per_epoch"]
    assert plan("target.reuse_states_gb=1").time["later_epoch_hours"] == pytest.approx(drafter)
    assert plan().disk["cache_bytes"] == 0


def test_auto_shares_the_gpus_out_as_a_run_would(plan: Make) -> None:
    made = plan("drafter.block_size=16", gpus=4)
    target, drafter = made.seconds["target_batch"], made.seconds["drafter_step"] + made.seconds["update"]
    assert made.chosen.targets == 0  # both fit one device, so all four do both
    assert (made.chosen.ranks, made.chosen.idle, made.queue) == (4, 0, None)
    odd = plan("train.accumulation=1", gpus=4)  # one rank only: three targets feed it, or three GPUs idle
    assert (odd.chosen.targets, odd.chosen.ranks) == (3, 1)
    assert odd.chosen.tokens_per_second > max(one.tokens_per_second for one in odd.options if one != odd.chosen)
    seconds = max(target / 3, drafter)
    assert odd.chosen.tokens_per_second * seconds == pytest.approx(
        odd.data["tokens_per_epoch"] / odd.data["batches_per_epoch"], rel=0.05
    )
    assert odd.chosen.bound == ("targets" if target / 3 > drafter else "drafters")


def test_a_named_split_is_taken_with_its_queue(plan: Make) -> None:
    made = plan("devices.targets=[0,1]", "devices.drafters=[2,3]")
    target, drafter = made.seconds["target_batch"], made.seconds["drafter_batch"]
    rate = min(2 / target, 2 / drafter)
    shared = made.seconds["update"] + made.seconds["gradient_sum"]  # once in two batches of a rank
    assert made.seconds["gradient_sum"] > 0
    assert drafter == pytest.approx(made.seconds["drafter_step"] + shared / 2)
    assert made.device["gpus"] == 4
    assert made.waits["drafters_wait"] == pytest.approx(1 - rate * drafter / 2)
    assert made.queue is not None
    slot = TOKENS * WIDTH * 2
    assert made.queue["slots_per_rank"] == 3  # two leases for each target, over two ranks, and one
    assert made.queue["gb_per_second"] == pytest.approx(rate * slot / 1e9)
    assert made.queue["gb_per_second_each_drafter"] == pytest.approx(rate * slot / 2e9)
    assert made.time["gpu_hours"] == pytest.approx(4 * made.time["total_hours"])
    assert made.host["slots"] == 0
    host = plan("devices.targets=[0,1]", "devices.drafters=[2,3]", "handoff.queue=host", "handoff.slots=5")
    assert host.host["slots"] == 2 * 5 * slot


def test_memory_of_a_drafter_gpu_is_the_estimate_of_its_step_and_the_slots(plan: Make) -> None:
    made = plan("devices.targets=[0]", "devices.drafters=[1]")
    target, drafter = made.memory
    spec_parameters, slot = made.drafter["parameters"], TOKENS * WIDTH * 2
    assert drafter.parts["weights"] == 18 * spec_parameters
    assert drafter.parts["slots"] == 3 * slot
    assert drafter.parts["states"] == slot  # the copy that a CUDA graph reads; the batch itself lies in a slot
    assert drafter.total_bytes == sum(drafter.parts.values())
    assert drafter.groups == 1
    assert target.parts["target"] == 2 * made.target["parameters"]
    assert target.parts["buffers"] == 2 * slot
    widest = 32 + 2 * 16 + 32 + 2 * 48 + 32  # what the matrices of a layer put out
    assert target.parts["forward pass"] == 2 * TOKENS * (widest + 48 + 4 * 32)
    inline = plan().memory[0]
    assert inline.role == "inline"
    assert "embedding and head" not in inline.parts  # the target's own
    assert inline.total_bytes < target.total_bytes + drafter.total_bytes


def test_blocks_go_in_groups_where_memory_is_short(plan: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftmill.run.plan_estimate import CONTEXT_BYTES, Estimator

    settings = ("devices.targets=[0]", "devices.drafters=[1]", "train.anchors=128", "drafter.intermediate_size=4096")
    seen: list[Estimator] = []
    original = Estimator.memory
    monkeypatch.setattr(Estimator, "memory", lambda own, *sizes: (seen.append(own), original(own, *sizes))[1])
    plan(*settings)
    sizes = {"context_rows": TOKENS, "anchors": 128, "tied": True}
    need = {groups: estimate(seen[0].spec, groups=groups, **sizes).total for groups in (1, 2, 4, 8, 16, 32, 64, 128)}
    slots = 3 * TOKENS * WIDTH * 2
    assert need[4] < need[2]
    cut("h200", ((need[4] + need[2]) / 2 / 0.9 + CONTEXT_BYTES + slots) / 1e9, monkeypatch)
    assert plan(*settings).memory[1].groups == 4
    cut("h200", (need[128] * 0.99 / 0.9 + CONTEXT_BYTES + slots) / 1e9, monkeypatch)
    least = plan(*settings)
    assert least.memory[1].groups is None
    assert any("drafter GPU" in line and "even with one block at a time" in line for line in least.problems)


def test_what_does_not_fit_is_said_with_the_remedy(plan: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan().problems == []
    many = ("drafter.taps=[0,1,2,3,4,5]", "train.anchors=1")  # states of an epoch are much beside the step
    reused = plan("target.reuse_states_gb=1", *many)
    assert reused.memory[0].parts["reused states"] == reused.data["tokens_per_epoch"] * 6 * 32 * 2
    assert reused.problems == []
    cut("h200", reused.memory[0].total_bytes / 1e9 - 1e-6, monkeypatch)
    assert "lower target.reuse_states_gb" in plan("target.reuse_states_gb=1", *many).problems[0]
    assert plan(*many).problems == []
    cut("h200", 0.702, monkeypatch)  # 2 MB beside CUDA; the weights of the target are 3.3
    wide = plan("devices.targets=[0]", "devices.drafters=[1]")
    assert "the target alone is too large" in wide.problems[0]
    assert [one.fits for one in plan(gpus=2).options] == [False] * 3


def test_a_checkpoint_holds_what_is_counted(plan: Make, bench: ModuleType) -> None:
    for name, tolerance in (("adamw", 1e-3), ("muon", 1e-3)):
        made = plan(f"train.optimizer={name}", "drafter.intermediate_size=512")
        spec = replace(
            bench.SMOLLM2, hidden_size=32, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
            head_dim=64, taps=(1, 2), layer_types=("full_attention",), layer_causal=(False,),
        )  # fmt: skip
        drafter = Drafter(spec)
        optimizer = make_optimizer(drafter.parameters(), TrainConfig(optimizer=name))
        for parameter in drafter.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        saved = [*drafter.state_dict().values(), *optimizer_tensors(optimizer).values()]
        assert made.disk["checkpoint_bytes"] == pytest.approx(sum(t.nbytes for t in saved), rel=tolerance)
        assert made.disk["while_saving_bytes"] == 3 * made.disk["checkpoint_bytes"]


# --- measured ---------------------------------------------------------------------------------------------------------


def test_a_cpu_is_measured_and_its_seconds_are_the_plans(
    plan: Make, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Measured] = []

    def here(*arguments: Any) -> Measured:  # in this process: starting another takes seconds
        found.append(measure_here(*arguments))
        return found[0]

    monkeypatch.setattr("draftmill.run.plan.measure", here)
    made = plan(f"target.model={tiny_target}", "devices.targets=cpu", "devices.drafters=cpu*2", measured=True)
    measured = found[0]
    assert made.seconds["target_batch"] == measured.target_seconds > 0
    assert made.seconds["drafter_step"] == measured.drafter_seconds > 0
    assert (made.chosen.targets, made.chosen.ranks, made.memory, made.problems) == (1, 2, [], [])
    drafters, targets = made.seconds["drafter_batch"] / 2, measured.target_seconds
    assert made.time["first_epoch_hours"] * 3600 == pytest.approx(
        made.data["batches_per_epoch"] * max(drafters, targets)
    )
    assert (made.device["name"], made.device["measured_on"]) == ("cpu", "cpu")
    assert made.assumptions[0].startswith("measured on cpu")
    assert not any("h200" in line for line in made.assumptions)
    assert json.loads(json.dumps(made.to_dict())) == made.to_dict()
    console = Console(width=2000, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    print_plan(made, console)
    text = console.export_text()
    assert "seconds measured on cpu" in text
    assert "memory of a GPU" not in text
    assert "h200" not in text


def test_a_measured_gpu_has_its_own_memory_and_the_links_of_the_named_one(
    plan: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA X", total_memory=90e9)
    )
    monkeypatch.setattr("draftmill.run.plan.measure", lambda _config, _spec, where: Measured(0.5, 0.25, together=False))
    made = plan("train.accumulation=3", device="h100", gpus=4, measured=True)
    assert (made.device["name"], made.device["gb"], made.device["peer_gbs"]) == ("NVIDIA X", 90, 450)
    assert made.device["measured_on"] == "cuda:0"
    assert made.chosen.targets > 0, "they do not fit one GPU together, it was measured"
    assert "update" in made.assumptions[0]
    with pytest.raises(UserError, match="a plan is for GPUs"):
        plan("devices=cpu", measured=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no GPU, but devices names some"):
        plan("devices.inline=[0,1]", measured=True)


# --- what is refused, and what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "gpus", "words"),
    [
        (("devices.targets=[0]", "devices.drafters=[1,2,3]"), None, "train.accumulation=6"),
        (("devices.inline=[0,1]",), 3, "--gpus 3, but devices names 2"),
        (("devices=cpu",), None, "devices=auto"),
        (("devices.targets=[0]", "devices.drafters=[0]"), None, "one process a GPU"),
        (("train.dtype=float32",), None, "use bfloat16"),
        (("target.dtype=float32",), None, "use bfloat16"),
        ((), 0, "--gpus 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    plan: Make, overrides: tuple[str, ...], gpus: int | None, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        plan(*overrides, gpus=gpus)


def test_an_unknown_device_is_refused_with_those_known(plan: Make) -> None:
    with pytest.raises(UserError, match=r"--device v100.* h200, b200, h100, a100-80, a100-40, rtx4090"):
        plan(device="v100")


def test_notes_say_what_is_wasted(plan: Make) -> None:
    assert plan().notes == []
    places = plan().data["places_per_batch"]
    assert 24 < places < TOKENS - 1
    notes = plan(f"train.anchors={math.ceil(places) + 1}", "train.max_minutes=0.0001").notes
    assert "places for a block" in notes[0]
    assert "of its schedule" in notes[1]
    idle = plan("train.accumulation=3", gpus=4)
    assert (idle.chosen.idle > 0) == any("train.accumulation=4 would use all" in note for note in idle.notes)
    slow = plan("train.kernels=plain")
    assert "plain" in slow.notes[0]
    assert slow.seconds["drafter_step"] > 10 * plan().seconds["drafter_step"]


def test_a_queue_between_gpus_that_cannot_reach_each_other(plan: Make) -> None:
    split = ("devices.targets=[0]", "devices.drafters=[1]")
    found = plan(*split, device="rtx4090")
    assert found.queue is not None
    assert (found.queue["where"], found.queue["link_gb_per_second"]) == ("host", 32)
    assert "slots" not in found.memory[1].parts
    wished = plan(*split, "handoff.queue=device", device="rtx4090")
    assert "use host" in wished.problems[0]


def test_every_assumption_is_printed_and_the_numbers_are_those_of_the_json(plan: Make) -> None:
    made = plan(device="h100", gpus=2)
    console = Console(width=2000, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    print_plan(made, console)
    text = console.export_text()
    assert [line for line in made.assumptions if line not in text] == []
    assert "not measured: 989 TFLOP/s of the data sheet × 0.67" in text
    assert f"{made.time['tokens_per_second']:,.0f} context tokens/s" in text
    assert all(one.describe() in text for one in made.options)
    assert json.loads(json.dumps(made.to_dict())) == made.to_dict()


def test_the_page_explains_every_key(plan: Make) -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")

    def keys(values: dict[str, Any]) -> list[str]:
        inner = [key for value in values.values() if isinstance(value, dict) for key in keys(value)]
        return [*values, *inner]

    made = plan("devices.targets=[0]", "devices.drafters=[1]").to_dict()
    made |= {"chosen": made["options"][0], "gpu": {k: v for k, v in made["memory"][0].items() if k != "parts"}}
    assert [key for key in keys(made) if key != "gpu" and f"`{key}`" not in page] == []
