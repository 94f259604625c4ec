"""How much device memory the fused step takes, before anything is allocated, and what follows from it.

No kernel is imported here: plans are made where none can run.

Legend: T context tokens, M draft tokens of a group (blocks · B), H hidden size, F intermediate size, V vocabulary,
L layers, K taps. All sizes in bytes; activations in two bytes a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftmill.drafter.config import DrafterSpec

TWO, FOUR = 2, 4

Fp8Use = Literal["none", "head", "all"]  # what is multiplied in fp8, a byte a number
MARGIN = 1.02  # what the allocator rounds up
HEADROOM = 0.9  # of the free memory: an inline rank's target needs some for its own forward pass
CHUNK_ROWS = 4096  # of the logits: whole waves of tiles in both products, 2 GB at a vocabulary of 248,320
GRAPH_HIDDEN_SIZE = 2048  # up to this the launches of a step take longer than its arithmetic
PLAIN_BYTES = 4 * FOUR  # a parameter in the plain step: fp32 weight, gradient and two moments


@dataclass(frozen=True, slots=True)
class Memory:
    """weights: fp32 masters, their gradients, low-precision copies, Adam's two moments. matrices: the target's
    embedding and head, and two copies of the head in fp8. context: what the context pass keeps. blocks: the most that
    a group of blocks needs."""

    weights: int
    matrices: int
    features: int
    context: int
    blocks: int

    @property
    def total(self) -> int:
        return int(MARGIN * (self.weights + self.matrices + self.features + self.context + self.blocks))

    def describe(self) -> str:
        parts = (("weights", self.weights), ("embedding and head", self.matrices), ("states", self.features),
                 ("context", self.context), ("blocks", self.blocks))  # fmt: skip
        return f"{self.total / 1e9:.1f} GB = " + " + ".join(f"{name} {size / 1e9:.1f}" for name, size in parts)


def parameters(spec: DrafterSpec) -> int:
    h, q, kv = spec.hidden_size, _queries(spec), _keys(spec)
    layer = h * (q + 2 * kv) + q * h + 3 * h * spec.intermediate_size + 2 * h + 2 * spec.head_dim
    return spec.layers * layer + len(spec.taps) * h * h + 2 * h


def uses_graph(spec: DrafterSpec) -> bool:
    """Whether the step is captured as a CUDA graph."""
    return spec.hidden_size <= GRAPH_HIDDEN_SIZE


def estimate(
    spec: DrafterSpec,
    *,
    context_rows: int,
    anchors: int,
    groups: int,
    tied: bool,
    graph: bool | None = None,
    fp8: Fp8Use = "none",
) -> Memory:
    """Of a step with the given T, N and number of groups. graph: whether it is one, if not as `uses_graph` says; a
    graph has a copy of the batch's features of its own."""
    buffers = 2 if (uses_graph(spec) if graph is None else graph) else 1
    rows = -(-anchors // groups) * spec.block_size
    return Memory(
        weights=parameters(spec) * (4 * FOUR + TWO),
        matrices=((1 if tied else 2) + (fp8 != "none")) * spec.vocab_size * spec.hidden_size * TWO,
        features=buffers * context_rows * len(spec.taps) * spec.hidden_size * TWO,
        context=_context(spec, context_rows),
        blocks=_kept(spec, rows) + max(_loss(spec, rows, fp8), _backward(spec, rows, fp8)),
    )


def fewest_groups(
    spec: DrafterSpec,
    available: float,
    *,
    context_rows: int,
    anchors: int,
    tied: bool,
    graph: bool | None = None,
    fp8: Fp8Use = "none",
) -> tuple[int | None, Memory]:
    """1, 2, 4 … groups, the first with which the step fits HEADROOM of `available` bytes, and what it takes then. None
    if not even one block at a time fits, and what the most groups take."""
    groups, memory = 1, None
    while groups <= anchors:
        memory = estimate(
            spec, context_rows=context_rows, anchors=anchors, groups=groups, tied=tied, graph=graph, fp8=fp8
        )
        if memory.total <= HEADROOM * available:
            return groups, memory
        groups *= 2
    assert memory is not None, "there is at least one anchor"
    return None, memory


def checkpoint_bytes(spec: DrafterSpec, optimizer: str) -> int:
    """fp32 weights and AdamW's two moments of each; Muon keeps one moment of each matrix."""
    h, layers = spec.hidden_size, spec.layers
    norms = layers * (2 * h + 2 * spec.head_dim) + 2 * h
    matrices = parameters(spec) - norms
    return FOUR * ((2 if optimizer == "muon" else 3) * matrices + 3 * norms)


def _context(spec: DrafterSpec, rows: int) -> int:
    """fc's output, its norm and the norm's gradient; in each layer keys and values before and after, and gradients."""
    return rows * (4 * spec.hidden_size + spec.layers * 5 * _keys(spec)) * TWO


def _kept(spec: DrafterSpec, rows: int) -> int:
    """From forward to backward, all layers: the residual stream and its norm twice, projections, attention's output."""
    layer = 4 * spec.hidden_size + 2 * _queries(spec) + 3 * _keys(spec) + 2 * spec.intermediate_size + _queries(spec)
    return rows * (spec.layers * (layer * TWO + spec.num_attention_heads * FOUR) + 2 * spec.hidden_size * TWO)


def _loss(spec: DrafterSpec, rows: int, fp8: Fp8Use) -> int:
    """The gradient of all rows and a chunk's rows, logits and gradient. In fp8 the logits' gradient lies apart."""
    chunk = min(rows, CHUNK_ROWS)
    apart = 0 if fp8 == "none" else chunk * (spec.vocab_size + 3 * spec.hidden_size)
    return (rows * spec.hidden_size + chunk * (spec.vocab_size + 2 * spec.hidden_size)) * TWO + apart


def _backward(spec: DrafterSpec, rows: int, fp8: Fp8Use) -> int:
    """The last layer's MLP, where all that was kept is still there. In fp8 also what its gradient is rounded to."""
    rounded = 2 * spec.intermediate_size if fp8 == "all" else 0
    return rows * ((4 * spec.hidden_size + spec.intermediate_size) * TWO + rounded)


def _queries(spec: DrafterSpec) -> int:
    return spec.num_attention_heads * spec.head_dim


def _keys(spec: DrafterSpec) -> int:
    return spec.num_key_value_heads * spec.head_dim
