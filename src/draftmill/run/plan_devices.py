"""What batches cost on GPUs that need not be here: named devices, the arithmetic of both sides, and seconds from both.

Measured figures are those of docs/log.md and docs/gpu.md; what else goes into a number is said by `assumptions`.

Legend: T tokens of a batch, N anchors, B block size, P parameters of the drafter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftmill.data.plan import BatchPlan
from draftmill.drafter.anchors import valid_anchors
from draftmill.drafter.config import DrafterSpec
from draftmill.drafter.memory import Fp8Use, parameters
from draftmill.errors import UserError
from draftmill.target.isolation import row_groups

H200_TFLOPS, H200_SHEET_TFLOPS, H200_TBS = 665.0, 989.0, 4.8
SHEET_SHARE = H200_TFLOPS / H200_SHEET_TFLOPS  # of the data sheet's rate, sustained by the one device measured
PRODUCT_SHARE = 0.98  # of the sustained rate: the drafter's products
FP8_TIMES = 1.8  # as fast as in bfloat16, casts included: measured at the 27B shape, head and all
ATTENTION_SHARE = 0.40  # attention of either side
TARGET_SHARE = 0.75  # the target's products: 500 of 665 TFLOP/s
ROW_SECONDS = 50e-9  # each draft token and layer, on an h200: norms, rotation, loss kernel
LAUNCH_SECONDS = 104e-6  # target, each layer × (documents + 1): 0.177 s for 28 layers and 60 documents
PLAIN_SECONDS = 1.38e-3  # the drafter's plain step, each layer × document: 0.42 s for 5 layers and 61 documents
UPDATE_BYTES = 42  # of memory traffic for each parameter: norm, AdamW, low-precision copy, clearing
NEWTON_SCHULZ = 5  # iterations of Muon
SAMPLE = 16  # batches looked at
CPU_GBS = 10.0  # between processes of a host, for gradients and states; assumed
FIRST_STEP_SECONDS = {"nothing_compiled": 21.0, "some_compiled": 8.0, "small_shape": 13.0}  # h200; see docs/gpu.md


@dataclass(frozen=True, slots=True)
class Device:
    """tflops: sustained in bfloat16. gb, tbs: memory and its bandwidth. host_gbs, peer_gbs: a direction of the links to
    the host and to other GPUs; peer_gbs 0: none. All but a measured `tflops` are the data sheet's."""

    name: str
    tflops: float
    gb: float
    tbs: float
    host_gbs: float
    peer_gbs: float
    measured: bool = False

    @property
    def flops(self) -> float:
        return self.tflops * 1e12

    @property
    def origin(self) -> str:
        """Where `tflops` comes from."""
        if self.measured:
            return "measured: 8192³ bfloat16 products sustained 655 and 676 TFLOP/s on two cards"
        return (
            f"not measured: {self.tflops / SHEET_SHARE:,.0f} TFLOP/s of the data sheet × {SHEET_SHARE:.2f}, the share "
            "that the measured h200 sustains"
        )


def this_machine(like: Device, available: int) -> tuple[str, Device]:
    """Where `plan --measure` measures, and what is known of it: memory as it is (a CPU's `available` bytes), links and
    rates of `like` for a GPU, none for a CPU."""
    if not torch.cuda.is_available():
        return "cpu", Device("cpu", 0.0, available / 1e9, 0.0, CPU_GBS, 0.0)
    found = torch.cuda.get_device_properties(0)
    return "cuda:0", replace(like, name=str(found.name), gb=found.total_memory / 1e9)


def _from_sheet(name: str, tflops: float, gb: float, tbs: float, host_gbs: float, peer_gbs: float) -> Device:
    return Device(name, tflops * SHEET_SHARE, gb, tbs, host_gbs, peer_gbs)


DEVICES = {
    device.name: device
    for device in (
        Device("h200", H200_TFLOPS, 141, H200_TBS, 64, 450, measured=True),
        _from_sheet("b200", 2250, 180, 8.0, 64, 900),
        _from_sheet("h100", 989, 80, 3.35, 64, 450),
        _from_sheet("a100-80", 312, 80, 2.04, 32, 300),
        _from_sheet("a100-40", 312, 40, 1.56, 32, 300),
        _from_sheet("rtx4090", 165, 24, 1.01, 32, 0),
    )
}


def find_device(name: str) -> Device:
    """UserError for one that is not in the table."""
    if name not in DEVICES:
        raise UserError(f"--device {name}: nothing is known of it; known are {', '.join(DEVICES)}")
    return DEVICES[name]


# --- what a batch holds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """Some batches of the first epoch. lengths: of the documents in each; starts: for each the positions, within their
    documents, at which a block may begin."""

    lengths: list[list[int]]
    starts: list[torch.Tensor]

    @property
    def tokens(self) -> float:
        return _mean(sum(batch) for batch in self.lengths)

    @property
    def documents(self) -> float:
        return _mean(len(batch) for batch in self.lengths)

    @property
    def valid(self) -> float:
        """Positions at which a block may begin, in a batch."""
        return _mean(len(starts) for starts in self.starts)

    def context_seen(self, window: int | None) -> float:
        """Context tokens that a block sees in a layer: the mean over all places where one may begin."""
        starts = torch.cat(self.starts).double()
        return float((starts if window is None else starts.clamp(max=window)).mean())

    def as_run(self, *, packed: bool) -> list[list[tuple[int, int]]]:
        """How the target runs each batch: for each forward pass its number of rows and their length."""
        if packed:
            return [[(1, length) for length in batch] for batch in self.lengths]
        return [_rows(batch) for batch in self.lengths]


def take_sample(plan: BatchPlan) -> Sample:
    """Batches evenly spread over the first epoch."""
    count = min(SAMPLE, plan.batches_per_epoch)
    lengths, starts = [], []
    for number in range(count):
        batch = plan.batch(number * plan.batches_per_epoch // count)
        lengths.append([end - start for start, end in batch.spans()])
        starts.append(batch.position_ids[valid_anchors(batch.loss_mask, batch.document_ids)])
    return Sample(lengths, starts)


def _rows(lengths: list[int]) -> list[tuple[int, int]]:
    spans, start = [], 0
    for length in lengths:
        spans.append((start, start + length))
        start += length
    return [(len(group), max(lengths[document] for document in group)) for group in row_groups(spans, start)]


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


# --- the drafter ------------------------------------------------------------------------------------------------------


def product_flops(spec: DrafterSpec, tokens: int, anchors: int) -> float:
    """Of all matrix products of a micro-step, forward and backward; rows without a loss need none with the head."""
    matrices, keys_values = sum(o * i for o, i in layer_matrices(spec)), 2 * _keys(spec) * spec.hidden_size
    drafts = anchors * spec.block_size
    layers = spec.layers * (drafts * matrices + tokens * keys_values)
    fc = tokens * len(spec.taps) * spec.hidden_size**2
    head = anchors * (spec.block_size - 1) * spec.hidden_size * spec.vocab_size
    return 2.0 * (3 * layers + 2 * fc + 2 * head)  # features and head have no gradient of their own


def fp8_flops(spec: DrafterSpec, tokens: int, anchors: int, use: Fp8Use) -> float:
    """Of these, what is multiplied in fp8: of the head both products, of the layers all but gradients of weights."""
    head = 2 * 2.0 * anchors * (spec.block_size - 1) * spec.hidden_size * spec.vocab_size
    if use != "all":
        return head if use == "head" else 0.0
    everything = product_flops(spec, tokens, anchors)
    fc = 2.0 * tokens * len(spec.taps) * spec.hidden_size**2
    return head + fc + (everything - head - 2 * fc) * 2 / 3


def attention_flops(spec: DrafterSpec, anchors: int, sample: Sample) -> float:
    """Forward and backward: two products forward, five backward, over the pairs that see each other."""
    pairs = 0.0
    for layer, causal in enumerate(spec.layer_causal):
        inside = (spec.block_size + 1) / 2 if causal else spec.block_size
        pairs += anchors * spec.block_size * (sample.context_seen(spec.window(layer)) + inside)
    return 7 * 2.0 * spec.num_attention_heads * spec.head_dim * pairs


def drafter_seconds(
    spec: DrafterSpec, device: Device, tokens: int, anchors: int, sample: Sample, fp8: Fp8Use = "none"
) -> float:
    """The fused micro-step of a batch."""
    saved = (1 - 1 / FP8_TIMES) * fp8_flops(spec, tokens, anchors, fp8)
    products = (product_flops(spec, tokens, anchors) - saved) / (PRODUCT_SHARE * device.flops)
    attention = attention_flops(spec, anchors, sample) / (ATTENTION_SHARE * device.flops)
    rows = ROW_SECONDS * anchors * spec.block_size * spec.layers * H200_TBS / device.tbs
    return products + attention + rows


def plain_seconds(spec: DrafterSpec, sample: Sample) -> float:
    """The plain micro-step takes at least so long: it goes document by document."""
    return PLAIN_SECONDS * spec.layers * sample.documents


def update_seconds(spec: DrafterSpec, device: Device, optimizer: str) -> float:
    """An optimizer step on one rank, once the gradients are there."""
    arithmetic = newton_schulz_flops(spec) if optimizer == "muon" else 0.0
    return UPDATE_BYTES * parameters(spec) / (device.tbs * 1e12) + arithmetic / (PRODUCT_SHARE * device.flops)


def gradient_sum_seconds(spec: DrafterSpec, device: Device, ranks: int) -> float:
    """Of fp32 gradients over the ranks, in a ring; over the host where GPUs have no link of their own."""
    moved = 2 * (ranks - 1) / ranks * 4 * parameters(spec)
    return moved / ((device.peer_gbs or device.host_gbs) * 1e9)


def newton_schulz_flops(spec: DrafterSpec) -> float:
    """Of Muon's update: three products an iteration for each matrix, on its shorter side."""
    total = 0.0
    for shape in drafter_matrices(spec):
        short, long = sorted(shape)
        total += NEWTON_SCHULZ * (4.0 * short * short * long + 2.0 * short**3)
    return total


def layer_matrices(spec: DrafterSpec) -> list[tuple[int, int]]:
    """(outputs, inputs) of q, k, v, out, gate, up and down."""
    h, f, q, kv = spec.hidden_size, spec.intermediate_size, spec.num_attention_heads * spec.head_dim, _keys(spec)
    return [(q, h), (kv, h), (kv, h), (h, q), (f, h), (f, h), (h, f)]


def drafter_matrices(spec: DrafterSpec) -> list[tuple[int, int]]:
    """(outputs, inputs) of every matrix with a gradient."""
    return [*layer_matrices(spec) * spec.layers, (spec.hidden_size, len(spec.taps) * spec.hidden_size)]


def _keys(spec: DrafterSpec) -> int:
    return spec.num_key_value_heads * spec.head_dim


# --- the target -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TargetCost:
    """parameters: of the whole model. active: those in matrices that a token meets up to the last tap. windows: of each
    attention layer run, None where it is full. recurrent: layers run that carry a state. width: numbers that the
    matrices of the widest layer put out for a token. heads_width: query heads × their size. experts: whether only some
    of them run. tied: embedding is head."""

    parameters: int
    active: int
    windows: list[int | None]
    recurrent: int
    width: int
    heads_width: int
    hidden_size: int
    experts: bool
    tied: bool

    @property
    def layers(self) -> int:
        return len(self.windows) + self.recurrent


def target_cost(config: Any, last_tap: int, *, trust_remote_code: bool) -> TargetCost:
    """From the model's structure: it is made without memory for its weights. config: of `load_config`."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"target.model: transformers makes no causal language model of {config.model_type}: {reason}"
        ) from error
    layers = list(model.get_decoder().layers)[: last_tap + 1]
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * len(layers))[: last_tap + 1]
    sliding = getattr(config, "sliding_window", None)
    parts = [_layer_cost(layer, config) for layer in layers]
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return TargetCost(
        parameters=sum(p.numel() for p in model.parameters()),
        active=round(sum(active for active, _ in parts)),
        windows=[sliding if kind == "sliding_attention" else None for kind in kinds if not _recurrent(kind)],
        recurrent=sum(_recurrent(kind) for kind in kinds),
        width=round(max(width for _, width in parts)),
        heads_width=heads * head_dim,
        hidden_size=int(config.hidden_size),
        experts=_chosen_share(config) < 1,
        tied=model.get_input_embeddings().weight is model.get_output_embeddings().weight,
    )


def target_seconds(target: TargetCost, device: Device, sample: Sample, *, packed: bool) -> float:
    """A forward pass over a batch, up to the last tap: arithmetic, or launches where they take longer."""
    each = [_batch_seconds(target, device, passes, packed=packed) for passes in sample.as_run(packed=packed)]
    return _mean(each)


def _batch_seconds(target: TargetCost, device: Device, passes: list[tuple[int, int]], *, packed: bool) -> float:
    tokens = sum(rows * length for rows, length in passes)
    pairs = sum(rows * causal_pairs(length, window) for window in target.windows for rows, length in passes)
    products = 2.0 * target.active * tokens / (TARGET_SHARE * device.flops)
    attention = 4.0 * target.heads_width * pairs / (ATTENTION_SHARE * device.flops)
    return max(products + attention, LAUNCH_SECONDS * target.layers * (len(passes) + 1))


def causal_pairs(length: int, window: int | None) -> float:
    """Query and key pairs of a document in which each token sees itself and those before it, within the window."""
    if window is None or length <= window:
        return length * (length + 1) / 2
    return window * (window + 1) / 2 + (length - window) * window


def _layer_cost(layer: torch.nn.Module, config: Any) -> tuple[float, float]:
    """(parameters of matrices that a token meets, numbers they put out for it)."""
    active = width = 0.0
    for name, parameter in layer.named_parameters():
        if parameter.ndim < 2:
            continue
        share = _chosen_share(config) if "experts" in name.split(".") else 1.0
        active += share * parameter.numel()
        width += share * parameter.numel() / parameter.shape[-1]
    return active, width


def _chosen_share(config: Any) -> float:
    """Of a mixture's experts, those that a token meets."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((value for name in names if (value := getattr(config, name, None))), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return 1.0 if experts is None or chosen is None else int(chosen) / int(experts)


def _recurrent(kind: str) -> bool:
    return kind == "linear_attention" or not kind.endswith("attention")


# --- in words ---------------------------------------------------------------------------------------------------------


def assumptions(
    device: Device, target: TargetCost, sample: Sample, *, packed: bool, auto: bool, kept: bool
) -> list[str]:
    """What the numbers rest on: one line each, and only what was used."""
    return [*rates(device), *_beside(target, sample, packed=packed, auto=auto, kept=kept), _slots(device)]


def rates(device: Device) -> list[str]:
    """What estimated seconds rest on."""
    return [
        f"{device.name}: {device.tflops:,.0f} TFLOP/s in bfloat16, {device.origin}; {device.gb:g} GB, "
        f"{device.tbs:g} TB/s, links of {device.host_gbs:g} GB/s to the host and {device.peer_gbs:g} to other GPUs a "
        "direction, all by the data sheet",
        f"drafter: products at {PRODUCT_SHARE:.0%} of that rate, attention at {ATTENTION_SHARE:.0%}, and "
        f"{ROW_SECONDS * 1e9:.0f} ns a draft token and layer at {H200_TBS} TB/s, more where memory is slower. Fits the "
        "steps measured on an h200 at the 27B shape (796 ms) and of SmolLM2 (19.6 ms) within 3 %; sizes between them "
        "were not measured",
        f"update: {UPDATE_BYTES} bytes of memory traffic a parameter; fp32 gradients are summed in a ring over the "
        "link, beside no arithmetic. Not measured",
        f"target: products at {TARGET_SHARE:.0%} of that rate (500 TFLOP/s on an h200: 27B shape with "
        "flash-linear-attention and small compiled functions; as transformers has it 428, without that library 295), "
        f"attention at {ATTENTION_SHARE:.0%}",
        f"target: launches take at least {LAUNCH_SECONDS * 1e6:.0f} µs for each layer × (documents + 1), from SmolLM2 "
        "on an h200 (0.177 s a batch of 16,384 tokens in 60 documents); taken for every GPU and host",
    ]


def _beside(target: TargetCost, sample: Sample, *, packed: bool, auto: bool, kept: bool) -> list[str]:
    lines = [
        f"lengths and places of blocks: from {len(sample.lengths)} batches of the first epoch",
        f"memory: {0.7:g} GB a GPU for CUDA; the target's forward pass holds what all matrices of its widest layer put "
        "out (not measured); the drafter's step as `train` estimates it; inline, both at once",
        "host: every process with a target reads all of its weights to host memory before they go to the GPU",
        "hours: without loading, the first step, checkpoints and the decode check",
    ]
    if auto:
        lines.append(
            f"target.isolation: auto is taken to choose {'packed' if packed else 'rows'}, by the layers' kinds"
        )
    if target.recurrent:
        lines.append(f"{target.recurrent} recurrent layers: only their matrices are counted, not their scans")
    if target.experts:
        lines.append("experts: at the rate of dense products, evenly used; theirs is lower")
    if kept:
        lines.append("kept states: none are there at the start; reading them back takes no time")
    return lines


def _slots(device: Device) -> str:
    reach = "reach each other, so slots lie in the drafters' memory, unless handoff.queue is host"
    no_reach = "cannot reach each other, so slots lie in host memory"
    return f"{device.name}: several GPUs {reach if device.peer_gbs else no_reach}"
