"""The micro-step on a GPU: one upload, fixed shapes, no wait; a CUDA graph where launches would bound it.

It computes what `step.micro_step` computes. The host draws anchors and makes the blocks, packs them with the positions
into one pinned buffer, and is free for the next batch while the device works.

Legend: T context tokens, N anchors, B block size, G groups of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftmill.drafter.attention import kinds
from draftmill.drafter.blocks import Blocks
from draftmill.drafter.config import DrafterSpec
from draftmill.drafter.fp8 import Fp8Head
from draftmill.drafter.fused_loss import PlainHead, fused_linear_cross_entropy
from draftmill.drafter.fused_model import ContextPass, block_pass
from draftmill.drafter.kernels.attention import Ranges, ranges
from draftmill.drafter.memory import CHUNK_ROWS, HEADROOM, estimate, fewest_groups, parameters, uses_graph
from draftmill.drafter.metrics import Sums, block_sums, zero_sums
from draftmill.drafter.model import Drafter
from draftmill.drafter.weights import ComputeWeights
from draftmill.errors import UserError
from draftmill.records import HiddenBatch
from draftmill.train.step import StepSettings, batch_blocks


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a step reads beside the features: one int32 buffer, taken apart.

    position_ids [T]; anchors, starts (first row of the anchor's document), first_positions, first_tokens [N]; labels
    and weights (fp32) [N, B].
    """

    position_ids: Tensor
    anchors: Tensor
    starts: Tensor
    first_positions: Tensor
    first_tokens: Tensor
    labels: Tensor
    weights: Tensor

    @staticmethod
    def size(context_rows: int, anchors: int, block_size: int) -> int:
        return context_rows + anchors * (4 + 2 * block_size)

    @staticmethod
    def pack(blocks: Blocks, position_ids: Tensor) -> Tensor:
        positions = blocks.position_ids[:, 0]
        integers = (
            position_ids, blocks.anchors, blocks.anchors - positions, positions, blocks.tokens[:, 0], blocks.labels
        )  # fmt: skip
        parts = [part.int().flatten() for part in integers]
        return torch.cat([*parts, blocks.weights.float().flatten().view(torch.int32)])

    @staticmethod
    def unpack(packed: Tensor, context_rows: int, anchors: int, block_size: int) -> Inputs:
        sizes = [context_rows, *[anchors] * 4, *[anchors * block_size] * 2]
        places, own, starts, positions, tokens, labels, weights = packed.split(sizes)
        shape = (anchors, block_size)
        fractions = weights.view(torch.float32).view(shape)
        return Inputs(places, own, starts, positions, tokens, labels.view(shape), fractions)


class FusedStep:
    """A `Step` for one shape of batch. Takes over the drafter's gradients (see `ComputeWeights`).

    groups: the blocks go through in so many parts, one after another; memory follows the size of a part. Left out: as
    few as the device's free memory allows. graph: capture the step; left out: where launches would bound it.
    """

    def __init__(
        self,
        drafter: Drafter,
        embedding: Tensor,
        head: Tensor,
        settings: StepSettings,
        *,
        groups: int | None = None,
        graph: bool | None = None,
    ) -> None:
        """embedding, head [V, H] of settings.dtype on the drafter's CUDA device; settings.fused_rows is T. UserError
        where not even one block at a time fits."""
        assert settings.fused_rows is not None
        spec = drafter.spec
        self._drafter, self._settings, self._rows = drafter, settings, settings.fused_rows
        self._embedding, self._head = embedding, head
        self._graph = uses_graph(spec) if graph is None else graph
        self._tied = embedding.data_ptr() == head.data_ptr()
        self._groups = self._fitting_groups() if groups is None else groups
        self.weights = ComputeWeights(drafter, settings.dtype, fp8=settings.fp8 == "all")
        self._head_product = PlainHead(head) if settings.fp8 == "none" else Fp8Head(head)
        self._captured: _Captured | None = None

    def prepare(self) -> FusedStep:
        """Compile all kernels, find memory, capture: before the first batch. Changes nothing."""
        spec, device = self._drafter.spec, self._head.device
        width = len(spec.taps) * spec.hidden_size
        features = torch.zeros(self._rows, width, dtype=self._settings.dtype, device=device)
        size = Inputs.size(self._rows, self._settings.anchors, spec.block_size)
        packed = torch.zeros(size, dtype=torch.int32, device=device)  # no weights: every gradient is 0
        if self._graph:
            self._captured = _Captured(self, features, packed)
        else:
            self.run(features, packed)
        return self

    def __call__(self, batch: HiddenBatch) -> Sums:
        blocks = batch_blocks(batch, self._drafter, self._settings)
        if not bool((blocks.weights > 0).any()):  # whatever its states are, even NaN: 0 · NaN is not zero
            return zero_sums(self._drafter.spec.block_size, batch.features.device)
        packed = Inputs.pack(blocks, batch.tokens.position_ids)
        if batch.features.is_cuda:
            packed = packed.pin_memory()  # from a pool: no new memory after the first steps
        if self._captured is not None:
            return self._captured(batch.features, packed)
        return self.run(batch.features, packed.to(batch.features.device, non_blocking=True))

    def describe(self) -> str:
        memory = estimate(
            self._drafter.spec,
            context_rows=self._rows,
            anchors=self._settings.anchors,
            groups=self._groups,
            tied=self._tied,
            graph=self._graph,
            fp8=self._settings.fp8,
        )
        groups = f", blocks in {self._groups} groups" if self._groups > 1 else ""
        fp8 = {"none": "", "head": ", head in fp8", "all": ", head and matrices in fp8"}[self._settings.fp8]
        return f"fused{', one CUDA graph' if self._graph else ''}{fp8}{groups}; about {memory.describe()}"

    def _fitting_groups(self) -> int:
        """What lies on the device already (masters, embedding, head, a batch) is part of the estimate."""
        if not self._head.is_cuda:
            return 1
        matrices = self._head.nbytes if self._tied else self._head.nbytes + self._embedding.nbytes
        here = matrices + sum(p.nbytes for p in self._drafter.parameters())
        free = torch.cuda.mem_get_info(self._head.device)[0]
        groups, memory = fewest_groups(
            self._drafter.spec,
            free + here,
            context_rows=self._rows,
            anchors=self._settings.anchors,
            tied=self._tied,
            graph=self._graph,
            fp8=self._settings.fp8,
        )
        if groups is None:
            raise UserError(
                f"the drafter's step needs at least {memory.describe()}, but {(free + here) / 1e9:.1f} GB can be had "
                f"on {self._head.device}, and it takes at most {HEADROOM:.0%}; lower data.token_budget, or use a "
                "larger GPU"
            )
        return groups

    def updated(self) -> None:
        self.weights.refresh()

    def clear(self) -> None:
        self.weights.clear_gradients()

    def run(self, features: Tensor, packed: Tensor) -> Sums:
        """Forward and backward: features [T, K·H], `Inputs.pack` on the device → sums; nothing waits for the device."""
        drafter, settings = self._drafter, self._settings
        spec, rows = drafter.spec, features.shape[0]
        inputs = Inputs.unpack(packed, rows, settings.anchors, spec.block_size)
        context = ContextPass(drafter, self.weights, features.to(settings.dtype), inputs.position_ids)
        nll = torch.zeros_like(inputs.weights)
        rank = torch.zeros(inputs.labels.shape, dtype=torch.int64, device=features.device)
        for part in parts(settings.anchors, self._groups):
            nll[part, 1:], rank[part, 1:] = self._group(context, inputs, part, rows)
        context.backward()
        return block_sums(nll, rank, inputs.weights, inputs.anchors >= 0)

    def _group(self, context: ContextPass, inputs: Inputs, part: slice, rows: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of some of the blocks → nll and rank [n, B − 1], of the slots that are drafted."""
        spec = self._drafter.spec
        slots = torch.arange(spec.block_size, device=inputs.anchors.device)
        mask = torch.full_like(inputs.first_tokens[:1], spec.mask_token_id)
        tokens = torch.cat((inputs.first_tokens[part], mask))
        positions = (inputs.first_positions[part][:, None] + slots).flatten()
        seen = layer_ranges(spec, inputs.anchors[part], inputs.starts[part], rows)
        hidden = block_pass(self._drafter, self.weights, context, self._embedding[tokens], positions, seen)
        labels, weights = inputs.labels[part, 1:].long(), inputs.weights[part, 1:]
        loss, stats = fused_linear_cross_entropy(
            hidden,
            self._head,
            labels.flatten(),
            weights.flatten(),
            rows=labels.numel(),
            chunk_rows=CHUNK_ROWS,
            head_product=self._head_product,
        )
        loss.backward()
        return stats.nll.view_as(weights), stats.rank.view_as(labels)


class _Captured:
    """The step as a CUDA graph over buffers of its own."""

    def __init__(self, step: FusedStep, features: Tensor, packed: Tensor) -> None:
        self._features = torch.zeros_like(features)
        self._packed = torch.zeros(packed.shape, dtype=packed.dtype, device=features.device)
        collected = step.weights.keep_gradients()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are compiled and memory is found outside of the capture
            for _ in range(2):
                step.run(self._features, self._packed)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._sums = step.run(self._features, self._packed)
        step.weights.restore_gradients(collected)

    def __call__(self, features: Tensor, packed: Tensor) -> Sums:
        self._features.copy_(features, non_blocking=True)
        self._packed.copy_(packed, non_blocking=True)
        self._graph.replay()
        return self._sums


def parts(anchors: int, groups: int) -> list[slice]:
    """Groups of equal size but the last."""
    size = -(-anchors // groups)
    return [slice(start, min(start + size, anchors)) for start in range(0, anchors, size)]


def layer_ranges(spec: DrafterSpec, anchors: Tensor, starts: Tensor, rows: int) -> list[Ranges]:
    """Who sees whom, for each layer; layers of a kind share it."""
    per_kind = {
        (window, causal): ranges(
            anchors, starts, block_size=spec.block_size, context_rows=rows, window=window, causal=causal
        )
        for window, causal in dict.fromkeys(kinds(spec))
    }
    return [per_kind[kind] for kind in kinds(spec)]


def warm_up(spec: DrafterSpec, settings: StepSettings, device: str) -> None:
    """Compile all kernels of a step while there is nothing to train on yet. Leaves nothing on the device.

    A layer of each kind is enough: the others are the same kernels. The groups are those of the whole drafter, whose
    masters lie on the device: the kernels are compiled for the size of a group.
    """
    assert settings.fused_rows is not None
    available = torch.cuda.mem_get_info(device)[0] + 4 * parameters(spec)
    groups, _ = fewest_groups(
        spec, available, context_rows=settings.fused_rows, anchors=settings.anchors, tied=False,
        fp8=settings.fp8,
    )  # fmt: skip
    if groups is None:
        return  # the step itself will say so
    numbers = [kinds(spec).index(kind) for kind in dict.fromkeys(kinds(spec))]
    small = replace(
        spec,
        layer_types=tuple(spec.layer_types[number] for number in numbers),
        layer_causal=tuple(spec.layer_causal[number] for number in numbers),
    )
    with torch.device(device):
        drafter = Drafter(small)
        matrix = torch.zeros(spec.vocab_size, spec.hidden_size, dtype=settings.dtype)
    FusedStep(drafter, matrix, matrix, settings, groups=groups, graph=False).prepare()
    torch.cuda.synchronize(device)
    del drafter, matrix
    torch.cuda.empty_cache()
