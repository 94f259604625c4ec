"""How fast the target gives hidden states, against the bare forward pass of the same model over as many tokens.

    python bench/target_forward.py TARGET [--tokens 4096] [--document-tokens 300] [--rounds 5] [--threads 2]

TARGET: folder or hub id of a model. Packs random documents (log-normal lengths, --document-tokens on average) into one
batch and alternates `Target.capture` of it with `AutoModelForCausalLM(...)` on one row of as many tokens. Taps are the
default ones, but for the last, which is the last layer: so both run the whole depth, and only the head is left out of
the capture. Prints the medians and the ratio, and the same for the default taps. The goal is 0.8 or more.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftmill.drafter.config import default_taps
from draftmill.records import TokenBatch
from draftmill.target.capture import Target
from draftmill.target.config import TargetConfig
from draftmill.target.shape import load_config, read_shape


def document_lengths(tokens: int, mean: int, seed: int = 0) -> list[int]:
    """Log-normal lengths that add up to `tokens`, as packed conversations do."""
    draw, lengths = random.Random(seed), []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, max(8, round(mean * draw.lognormvariate(-0.32, 0.8)))))
    return lengths


def make_batch(lengths: list[int], vocab: int) -> TokenBatch:
    total = sum(lengths)
    return TokenBatch(
        input_ids=torch.randint(0, vocab, (total,), generator=torch.Generator().manual_seed(0), dtype=torch.int32),
        loss_mask=torch.ones(total, dtype=torch.bool),
        position_ids=torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]),
        document_ids=torch.cat([torch.full((length,), d, dtype=torch.int32) for d, length in enumerate(lengths)]),
        documents=tuple(range(len(lengths))),
        index=0,
        bin=0,
        epoch=0,
    )


def seconds(call: Callable[[], object], device: str) -> float:
    started = time.perf_counter()
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - started


def bare_forward(target: str, device: str, input_ids: Tensor) -> Callable[[], object]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).to(device).eval()
    row = input_ids[None].long().to(device)

    @torch.no_grad()
    def forward() -> object:
        return model(input_ids=row, use_cache=False)

    return forward


def capture(target: Target, batch: TokenBatch) -> Callable[[], object]:
    features = torch.empty(batch.token_budget, target.features_width, dtype=target.dtype, device=target.device)
    return lambda: target.capture(batch, features)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--document-tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape = read_shape(load_config(arguments.target))
    lengths = document_lengths(arguments.tokens, arguments.document_tokens)
    batch = make_batch(lengths, shape.vocab_size)
    taps = default_taps(shape.layers, 5)
    whole_taps = (*taps[:-1], shape.layers - 1)
    config = TargetConfig(model=arguments.target)
    targets = [Target(config, chosen, device=arguments.device) for chosen in (whole_taps, taps)]
    bare = bare_forward(arguments.target, arguments.device, batch.input_ids)
    calls = [bare, *(capture(target, batch) for target in targets)]
    for call in calls:
        seconds(call, arguments.device)  # warm-up
    times = [[seconds(call, arguments.device) for call in calls] for _ in range(arguments.rounds)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    print(
        f"{arguments.target}, bfloat16, {arguments.device}, {arguments.threads} threads, isolation "
        f"{targets[0].isolation}; {batch.tokens} tokens in {len(lengths)} documents of {min(lengths)} … {max(lengths)}"
    )
    labels = ("bare forward, one row, head included", f"capture {whole_taps}", f"capture {taps}, the default")
    for label, median, column in zip(labels, medians, zip(*times, strict=True), strict=True):
        print(
            f"  {label:42} {batch.tokens / median:9,.0f} tokens/s  ratio {medians[0] / median:5.2f}"
            f"  ({min(column):.2f} … {max(column):.2f} s)"
        )


if __name__ == "__main__":
    main()
