"""Attention of one layer by each implementation, on one GPU, at the shapes of bench/drafter_step.py.

    python bench/attention.py [--shape 27b|smollm2] [--tokens 16384] [--seconds 2] [--tune]

Milliseconds of forward and of forward + backward, and TFLOP/s over the pairs that are really seen. Implementations: the
Triton kernels that the fused step uses, and the plain step's attention document by document. --tune instead times the
kernels with other tiles, one kernel changed at a time, on the first kind of layer; about a minute, mostly compiling.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from drafter_step import SHAPES, make_batch
from triton.runtime.errors import OutOfResources

from draftmill.drafter.attention import by_document, kinds
from draftmill.drafter.config import DrafterSpec
from draftmill.drafter.kernels.attention import TILES, Tile, block_attention, ranges
from draftmill.drafter.model import Drafter
from draftmill.train.step import StepSettings, batch_blocks

Call = Callable[..., torch.Tensor]
# rows, columns, warps, stages to try, by kernel; what `TILES` holds is always among them
CANDIDATES = {
    "forward": ((128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 4)),
    "queries": ((128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 8, 2), (128, 128, 8, 2)),
    "context": (
        (64, 128, 8, 2),
        (64, 128, 8, 3),
        (32, 128, 8, 3),
        (128, 128, 8, 2),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (32, 64, 4, 3),
    ),
    "draft": ((64, 64, 4, 2), (32, 32, 4, 2), (32, 128, 8, 2)),
}


def tune(run: Callable[[], object], size: int, seconds: float) -> None:
    """run: forward and backward. Milliseconds of it with each tile."""
    present = TILES[size, 2]
    for kernel, candidates in CANDIDATES.items():
        now = getattr(present, kernel)
        base = 0.0
        for tile in dict.fromkeys((now, *[Tile(*numbers) for numbers in candidates])):
            TILES[size, 2] = present._replace(**{kernel: tile})
            try:
                took = timed(run, seconds) * 1e3
            except OutOfResources:
                print(f"{kernel:8} {tuple(tile)!s:18}  does not fit", flush=True)
                continue
            base = base or took
            print(f"{kernel:8} {tuple(tile)!s:18} {took:8.3f} ms {took - base:+8.3f}", flush=True)
    TILES[size, 2] = present


def timed(call: Callable[[], object], seconds: float) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    started, calls = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
        calls += 5
    return (time.perf_counter() - started) / calls


def inputs(spec: DrafterSpec, tokens: int, drafts: int) -> list[torch.Tensor]:
    sizes = (
        (drafts, spec.num_attention_heads),
        *[(tokens, spec.num_key_value_heads)] * 2,
        *[(drafts, spec.num_key_value_heads)] * 2,
    )
    return [
        torch.randn(rows, heads, spec.head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for rows, heads in sizes
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    spec, tokens = shape.spec, arguments.tokens
    settings = StepSettings(tokens // shape.density, gamma=7.0, seed=0, dtype=torch.bfloat16)
    batch = make_batch(shape, tokens, torch.empty(0), 0)
    with torch.device("meta"):
        drafter = Drafter(spec)
    blocks = batch_blocks(batch, drafter, settings).to("cuda")
    documents, positions = (x.cuda() for x in (batch.tokens.document_ids, batch.tokens.position_ids))
    q, kc, vc, kd, vd = inputs(spec, tokens, blocks.tokens.numel())
    by_documents = by_document(spec, blocks, documents, positions)
    starts = blocks.anchors - blocks.position_ids[:, 0]
    for layer, (window, causal) in enumerate(kinds(spec)):
        if (window, causal) in kinds(spec)[:layer]:
            continue
        seen = ranges(
            blocks.anchors, starts, block_size=spec.block_size, context_rows=tokens, window=window, causal=causal
        )
        pairs = float((seen.hi - seen.lo).sum()) + blocks.tokens.numel() * spec.block_size
        flops = 4.0 * pairs * spec.num_attention_heads * spec.head_dim
        gradient = torch.randn_like(q)
        if arguments.tune:
            print(f"{arguments.shape} window {window} causal {causal}: forward and backward, difference to the present")
            tune(lambda s=seen, up=gradient: block_attention(q, kc, vc, kd, vd, s).backward(up), spec.head_dim, 0.3)
            return
        ways: dict[str, Call] = {
            "triton": lambda s=seen: block_attention(q, kc, vc, kd, vd, s),
            "plain": lambda n=layer: by_documents(n, q, torch.cat((kc, kd)), torch.cat((vc, vd))),
        }
        for name, way in ways.items():
            forward = timed(way, arguments.seconds)
            both = timed(lambda way=way, up=gradient: way().backward(up), arguments.seconds)
            rates = flops / forward / 1e12, 3.5 * flops / both / 1e12
            print(
                f"{arguments.shape} window {window} causal {causal} {name:7} forward {forward * 1e3:7.2f} ms "
                f"{rates[0]:5.0f} TFLOP/s, with backward {both * 1e3:7.2f} ms {rates[1]:5.0f} TFLOP/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
