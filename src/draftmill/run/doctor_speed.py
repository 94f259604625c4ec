"""How long the target's layers take here, for `draftmill doctor`: a layer of each kind with random weights, timed.

Where a library is missing or does not fit, transformers takes a slow substitute without a word. No weight is loaded.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterator
from typing import Any

import torch

from draftmill.config import RunConfig
from draftmill.run.doctor import Finding
from draftmill.run.doctor_checks import TARGET, Parts
from draftmill.run.doctor_target import RECURRENT

GPU_TOKENS, CPU_TOKENS = 4096, 128  # of a document that is run
CPU_PARAMETERS = 50_000_000  # of a layer: larger targets are not for CPUs, and making one takes long
SLOW = 2.0  # times as long as an attention layer, which has about as many weights
WARM_UP, TIMED = 2, 3
VOCABULARY = 64  # neither embedding nor head is timed


def layer_speed(config: RunConfig, parts: Parts) -> Iterator[Finding]:
    """Seconds of each kind of layer that is run, and of a batch."""
    spec, placement = parts.spec, parts.placement
    if spec is None or placement is None or parts.target is None:
        return
    device = (placement.targets or placement.drafters)[0]
    count = spec.taps[-1] + 1
    kinds = list(getattr(parts.target, "layer_types", None) or ["full_attention"] * count)[:count]
    tokens = min(config.data.token_budget, GPU_TOKENS if device.startswith("cuda") else CPU_TOKENS)
    try:
        seconds = time_layers(config, parts.target, kinds, device, tokens)
    except Exception as error:  # somebody else's model code: whatever it does, the other findings are worth having
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        yield Finding(TARGET, "layers", "warning", f"could not be timed ({why})", "their speed is unknown",
                      "try `draftmill train … --dry-run`")  # fmt: skip
        return
    if seconds is None:
        yield Finding(TARGET, "layers", "ok", "too large for a CPU to be timed here")
    else:
        yield judge(kinds, seconds, device, tokens, config.data.token_budget)


def judge(kinds: list[str], seconds: dict[str, float], device: str, tokens: int, budget: int) -> Finding:
    """seconds: of a layer of each kind for `tokens` tokens."""
    batch = sum(seconds[kind] for kind in kinds) * budget / tokens
    each = ", ".join(f"{kind} {value * 1e3:.2f} ms" for kind, value in seconds.items())
    found = (
        f"on {device}, with random weights: {each} for {tokens:,} tokens; about {batch:.2g} s for a batch of "
        f"{budget:,} tokens in {len(kinds)} layers"
    )
    attention = [value for kind, value in seconds.items() if kind not in RECURRENT]
    slow = [
        kind for kind, value in seconds.items() if kind in RECURRENT and attention and value > SLOW * max(attention)
    ]
    if not slow or not device.startswith("cuda"):  # a CPU has no fast kernels to lack
        return Finding(TARGET, "layers", "ok", found)
    consequence = f"{' and '.join(slow)} runs on slow kernels: over {SLOW:g} times as long as an attention layer"
    remedy = "install what the findings on packages name (flash-linear-attention, causal-conv1d), and look again"
    return Finding(TARGET, "layers", "warning", found, consequence, remedy)


def time_layers(config: RunConfig, target: Any, kinds: list[str], device: str, tokens: int) -> dict[str, float] | None:
    """Seconds of the fastest layer of each kind. None where the layers are too large for a CPU."""
    model = first_layers(config, target, kinds, device)
    if model is None:
        return None
    try:
        return _time(model.get_decoder(), kinds, device, tokens)
    finally:
        del model
        gc.collect()
        if device.startswith("cuda"):
            torch.cuda.empty_cache()


def first_layers(config: RunConfig, target: Any, kinds: list[str], device: str) -> Any:
    """The target's model, cut behind the first layer of its last kind, with random weights."""
    from transformers import AutoModelForCausalLM

    short = copy.deepcopy(target)
    short.num_hidden_layers = 1 + max(kinds.index(kind) for kind in set(kinds))
    if getattr(short, "layer_types", None):
        short.layer_types = list(short.layer_types)[: short.num_hidden_layers]
    short.vocab_size, short.pad_token_id = VOCABULARY, None
    options = {"dtype": getattr(torch, config.target.dtype), "trust_remote_code": config.target.trust_remote_code}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(short, **options)
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in model.get_decoder().layers]
    if device == "cpu" and max(sizes) > CPU_PARAMETERS:
        return None
    with torch.device(device):
        return AutoModelForCausalLM.from_config(short, **options).eval().requires_grad_(False)


@torch.no_grad()
def _time(decoder: Any, kinds: list[str], device: str, tokens: int) -> dict[str, float]:
    began: dict[int, float] = {}
    took: dict[str, list[float]] = {kind: [] for kind in kinds}

    def now() -> float:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for number, layer in enumerate(decoder.layers):
        layer.register_forward_pre_hook(lambda *_, n=number: began.__setitem__(n, now()))
        layer.register_forward_hook(lambda *_, n=number: took[kinds[n]].append(now() - began[n]))
    ids = torch.arange(tokens, device=device)[None] % VOCABULARY
    for turn in range(WARM_UP + TIMED):
        if turn == WARM_UP:
            for times in took.values():
                times.clear()
        decoder(input_ids=ids, use_cache=False)
    return {kind: min(times) for kind, times in took.items()}
