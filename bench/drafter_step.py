"""The drafter's micro-step on one GPU: speed, memory, how near to the card's own matrix speed, and where the rest goes.

    python bench/drafter_step.py [--shape 27b|smollm2] [--tokens 16384] [--seconds 20] [--groups G] [--plain]
                                 [--graph on|off] [--fp8 head all] [--update] [--profile]

Random weights and random hidden states of the given shape, one anchor per 8 tokens (4 for smollm2), all trained.
Forward and backward of one micro-step, batches prepared on the host as in a run; --update adds the optimizer's step to
each. --fp8 measures these uses of fp8 too, --plain the plain step, in the same process, with the ratio. Prints context
tokens/s, the rate of the matrix products against what an 8192³ product in bf16 reaches on this card, peak memory and
the time of the first step.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from draftmill.drafter.config import FULL, SLIDING, DrafterSpec
from draftmill.drafter.memory import Fp8Use, estimate, parameters
from draftmill.drafter.model import Drafter
from draftmill.records import HiddenBatch, TokenBatch
from draftmill.run.plan_devices import product_flops
from draftmill.train.config import TrainConfig
from draftmill.train.fused_step import FusedStep
from draftmill.train.optim import apply_update, make_optimizer
from draftmill.train.step import PlainStep, Step, StepSettings

QWEN_27B = DrafterSpec(
    hidden_size=5120, intermediate_size=17408, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    rms_norm_eps=1e-6, rope_theta=1e7, block_size=16, mask_token_id=248070, taps=(1, 16, 31, 46, 61),
    layer_types=(SLIDING,) * 4 + (FULL,), layer_causal=(True,) * 4 + (False,), sliding_window=2048, vocab_size=248320,
    num_target_layers=64, max_position_embeddings=262144,
)  # fmt: skip
SMOLLM2 = DrafterSpec(
    hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    rms_norm_eps=1e-5, rope_theta=1e5, block_size=8, mask_token_id=7, taps=(1, 8, 14, 20, 27),
    layer_types=(FULL,) * 5, layer_causal=(False,) * 5, sliding_window=None, vocab_size=49152,
    num_target_layers=30, max_position_embeddings=8192,
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """document: tokens of each. density: one anchor per so many tokens."""

    spec: DrafterSpec
    document: int
    density: int


SHAPES = {"27b": Shape(QWEN_27B, 4096, 8), "smollm2": Shape(SMOLLM2, 270, 4)}


def make_batch(shape: Shape, tokens: int, features: torch.Tensor, number: int) -> HiddenBatch:
    place = torch.arange(tokens, dtype=torch.int32)
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(0, shape.spec.vocab_size - 300, (tokens,), generator=draw, dtype=torch.int32)
    documents = place // shape.document
    count = int(documents[-1]) + 1
    batch = TokenBatch(
        ids, torch.ones(tokens, dtype=torch.bool), place % shape.document, documents, tuple(range(count)), number,
        number, 0
    )  # fmt: skip
    return HiddenBatch(batch, features, "bench", shape.spec.taps)


def ceiling() -> float:
    """FLOP/s of an 8192³ bf16 product on random data, over about two seconds."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    started, calls = time.perf_counter(), 0
    while time.perf_counter() - started < 2:
        for _ in range(20):
            a @ b
        torch.cuda.synchronize()
        calls += 20
    return calls * 2.0 * 8192**3 / (time.perf_counter() - started)


def timed(step: Callable[[int], None], seconds: float) -> float:
    """Seconds a call, over at least `seconds` of them, without waiting in between."""
    step(0)
    torch.cuda.synchronize()
    behind: list[torch.cuda.Event] = []
    started, calls = time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - started < seconds:
        step(calls)
        calls += 1
        behind.append(torch.cuda.Event())
        behind[-1].record()
        if len(behind) > 3:
            behind.pop(0).synchronize()  # the host must not run ahead without end
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / calls


@dataclass
class Result:
    name: str
    seconds: float
    first_seconds: float
    peak_gib: float


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.shape = arguments, SHAPES[arguments.shape]
        self.tokens = arguments.tokens
        self.anchors = self.tokens // self.shape.density
        spec = self.shape.spec
        self.settings = StepSettings(self.anchors, gamma=7.0, seed=0, dtype=torch.bfloat16)
        torch.manual_seed(0)
        self.head = torch.randn(spec.vocab_size, spec.hidden_size, device="cuda", dtype=torch.bfloat16) * 0.02
        self.embedding = torch.randn_like(self.head) * 0.02
        width = len(spec.taps) * spec.hidden_size
        self.features = torch.randn(self.tokens, width, device="cuda", dtype=torch.bfloat16)
        self.batches = [make_batch(self.shape, self.tokens, self.features, number) for number in range(4)]

    def drafter(self) -> Drafter:
        with torch.device("cuda"):
            drafter = Drafter(self.shape.spec)
        for parameter in drafter.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        return drafter

    def plain(self, drafter: Drafter) -> Step:
        return PlainStep(drafter, self.embedding, self.head, self.settings, always_run=False)

    def fused(self, drafter: Drafter, fp8: Fp8Use = "none") -> Step:
        graph = {"on": True, "off": False, None: None}[self.arguments.graph]
        settings = replace(self.settings, fused_rows=self.tokens, fp8=fp8)
        step = FusedStep(drafter, self.embedding, self.head, settings, groups=self.arguments.groups, graph=graph)
        return step.prepare()

    def measure(self, name: str, make: Callable[[Drafter], Step], seconds: float) -> Result:
        torch.cuda.reset_peak_memory_stats()
        drafter = self.drafter()
        started = time.perf_counter()
        step = make(drafter)
        optimizer = make_optimizer(drafter.parameters(), TrainConfig())
        parameters = list(drafter.parameters())

        def call(number: int) -> None:
            sums = step(self.batches[number % len(self.batches)])
            if self.arguments.update:
                apply_update(parameters, optimizer, weight=sums.totals[1], lr=1e-6, clip=1.0)
                step.updated()
            step.clear()

        call(0)
        torch.cuda.synchronize()
        first = time.perf_counter() - started
        result = Result(name, timed(call, seconds), first, torch.cuda.max_memory_allocated() / 2**30)
        if self.arguments.profile and name != "plain":
            profile(call, result.seconds)
        return result

    def estimated(self, fp8: Fp8Use) -> float:
        """GiB; what the optimizer keeps is not there without --update."""
        spec, groups = self.shape.spec, self.arguments.groups
        graph = {"on": True, "off": False, None: None}[self.arguments.graph]
        memory = estimate(
            spec, context_rows=self.tokens, anchors=self.anchors, groups=groups, tied=False, graph=graph, fp8=fp8
        )
        return (memory.total - (0 if self.arguments.update else 8 * parameters(spec))) / 2**30

    def fused_row(self, fp8: Fp8Use, limit: float) -> Result:
        gc.collect()
        torch.cuda.empty_cache()
        name = "fused" if fp8 == "none" else f"fp8 {fp8}"
        result = self.measure(name, lambda drafter: self.fused(drafter, fp8), self.arguments.seconds)
        self.report(result, limit)
        print(f"{'':8} memory: estimated {self.estimated(fp8):.1f} GiB, measured {result.peak_gib:.1f} GiB", flush=True)
        return result

    def report(self, result: Result, limit: float) -> None:
        rate = product_flops(self.shape.spec, self.tokens, self.anchors) / result.seconds
        print(
            f"{result.name:8} {result.seconds * 1e3:9.1f} ms {self.tokens / result.seconds:10,.0f} tok/s "
            f"{rate / 1e12:6.0f} TFLOP/s {rate / limit:6.1%} of the ceiling {result.peak_gib:7.1f} GiB "
            f"prepared, first step {result.first_seconds:6.1f} s",
            flush=True,
        )


def profile(call: Callable[[int], None], seconds: float, calls: int = 10) -> None:
    """Kernel time by name, and its share of the `seconds` that a step takes when nobody looks."""
    from torch.profiler import ProfilerActivity

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as record:
        for number in range(calls):
            call(number)
        torch.cuda.synchronize()
    events = [event for event in record.key_averages() if event.self_device_time_total > 0]
    total = sum(event.self_device_time_total for event in events) / 1e6
    each = total / calls
    print(f"profile: kernels {each * 1e3:.1f} ms of {seconds * 1e3:.1f} ms a step ({each / seconds:.1%} busy)")
    for event in sorted(events, key=lambda e: -e.self_device_time_total)[:28]:
        share, each = event.self_device_time_total / 1e6 / total, event.self_device_time_total / calls / 1e3
        print(f"  {share:6.1%} {each:8.2f} ms {event.count // calls:5} × {event.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--graph", choices=["on", "off"])
    parser.add_argument("--fp8", choices=["head", "all"], nargs="*", default=[])
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    limit = ceiling()
    what = f"{bench.tokens:,} tokens, {bench.anchors:,} anchors in {arguments.groups} groups"
    print(f"{arguments.shape}: {what}; 8192³ product {limit / 1e12:.0f} TFLOP/s")
    fused = bench.fused_row("none", limit)
    for fp8 in arguments.fp8:
        in_fp8 = bench.fused_row(fp8, limit)
        print(f"{'':8} {fused.seconds / in_fp8.seconds:.3f} times as fast as fused in bf16", flush=True)
    if arguments.plain:
        gc.collect()
        torch.cuda.empty_cache()
        plain = bench.measure("plain", bench.plain, arguments.seconds)
        bench.report(plain, limit)
        print(f"fused is {plain.seconds / fused.seconds:.2f} times as fast as plain")


if __name__ == "__main__":
    main()
