"""Attention kernels against softmax in float64 under the mask of `attention.visible`."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from draftmill.drafter.attention import visible
from draftmill.drafter.blocks import Blocks
from draftmill.drafter.kernels import attention as kernels
from draftmill.drafter.kernels.attention import Ranges, Tile, Tiles, block_attention, ranges

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies the bits of bf16 as if they were integers; fp16 takes the same path and the same tiles.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
SMALL = [Tiles(*[Tile(16, 32, 4, 2)] * 4), Tiles(*[Tile(32, 16, 4, 2)] * 4)]
NAMES = ["out", "queries", "context keys", "context values", "draft keys", "draft values"]
Batch = tuple[Blocks, Tensor, Tensor, Tensor]  # blocks, document ids [T], position ids [T], document starts [N]


def seed() -> int:
    return random.randrange(2**31)


@dataclass(frozen=True)
class Shape:
    heads: int = 3
    key_heads: int = 1
    size: int = 64
    block: int = 8
    context: int = 83
    anchors: int = 11
    padding: int = 2
    window: int | None = None
    causal: bool = False
    dtype: torch.dtype = torch.float32


def make_batch(shape: Shape, generator: torch.Generator) -> Batch:
    """Documents of random length. Some anchors are drawn, some forced: at place 0 of a document, its neighbour (closer
    than a block), and the last row of the document before, so that a tile of queries spans the boundary."""
    total = shape.context
    cuts = (torch.randperm(total - 4, generator=generator)[:3] + 2).sort().values
    document_ids = (torch.arange(total)[:, None] >= cuts[None, :]).sum(1)
    starts = torch.cat((torch.zeros(1, dtype=torch.long), cuts))
    position_ids = torch.arange(total) - starts[document_ids]
    boundary = int(cuts[1])
    forced = {0, boundary - 1, boundary, min(boundary + 1, total - 1)}
    drawn = [p for p in torch.randperm(total, generator=generator).tolist() if p not in forced]
    chosen = sorted(forced | set(drawn[: shape.anchors - shape.padding - len(forced)]))
    anchors = torch.tensor(chosen + [-1] * shape.padding)
    real = anchors >= 0
    documents = torch.where(real, document_ids[anchors], -1)
    first = torch.where(real, position_ids[anchors], 0)
    positions = first[:, None] + torch.arange(shape.block)
    unused = torch.zeros_like(positions)
    blocks = Blocks(anchors, unused, positions, documents, unused, unused.float())
    document_starts = torch.where(real, starts[documents.clamp_min(0)], 0)
    return blocks.to(DEVICE), document_ids.to(DEVICE), position_ids.to(DEVICE), document_starts.to(DEVICE)


def make_mask(shape: Shape, batch: Batch) -> Tensor:
    blocks, document_ids, position_ids, _ = batch
    return visible(blocks, document_ids, position_ids, window=shape.window, causal=shape.causal)


def make_ranges(shape: Shape, batch: Batch) -> Ranges:
    return ranges(
        batch[0].anchors,
        batch[3],
        block_size=shape.block,
        context_rows=shape.context,
        window=shape.window,
        causal=shape.causal,
    )


def make_inputs(shape: Shape, generator: torch.Generator) -> list[Tensor]:
    """The five inputs and the gradient of the output."""
    rows, context = shape.anchors * shape.block, shape.context
    lengths = [(rows, shape.heads)] + [(n, shape.key_heads) for n in (context, context, rows, rows)]
    lengths.append((rows, shape.heads))
    made = [torch.randn(length, heads, shape.size, generator=generator) for length, heads in lengths]
    made[0] *= 2  # uneven probabilities
    return [tensor.to(DEVICE, shape.dtype) for tensor in made]


def reference(inputs: list[Tensor], mask: Tensor) -> list[Tensor]:
    """Output and five gradients in float64."""
    *given, grad_out = (tensor.detach().double() for tensor in inputs)
    given = [tensor.requires_grad_() for tensor in given]
    queries, keys, values = given[0], torch.cat((given[1], given[3])), torch.cat((given[2], given[4]))
    group = queries.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("mhd,shd->hms", queries, keys) / queries.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    out = torch.einsum("hms,shd->mhd", weights, values)
    out.backward(grad_out)
    return [out.detach(), *(tensor.grad for tensor in given)]


def run_kernels(inputs: list[Tensor], seen: Ranges) -> list[Tensor]:
    """The same from the kernels. Whatever they leave unwritten of their own tensors is NaN."""
    *given, grad_out = inputs
    given = [tensor.detach().requires_grad_() for tensor in given]
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what `torch.empty` gives
    try:
        out = block_attention(*given, seen)
        out.backward(grad_out)
    finally:
        torch.use_deterministic_algorithms(False)
    return [out.detach(), *(tensor.grad for tensor in given)]


def compare(got: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    """Element by element, against the largest element of the tensor.

    fp32: some hundred products are summed. Half precision: probabilities, their gradients and the result are rounded,
    each by a part in 2⁹ (bf16) or 2¹² (fp16) at most.
    """
    for name, mine, theirs in zip(NAMES, got, expected, strict=True):
        assert mine.dtype == dtype
        assert mine.shape == theirs.shape
        worst = ((mine.double() - theirs).abs().max() / theirs.abs().max()).item()
        assert worst <= TOLERANCE[dtype], f"{name}: {worst:.2e} of the largest element"  # false for NaN


def check(shape: Shape, tiles: Tiles | None, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(number)
    if tiles is not None:
        monkeypatch.setitem(kernels.TILES, (shape.size, shape.dtype.itemsize), tiles)
    batch, inputs = make_batch(shape, generator), make_inputs(shape, generator)
    compare(run_kernels(inputs, make_ranges(shape, batch)), reference(inputs, make_mask(shape, batch)), shape.dtype)


@pytest.mark.parametrize("number", [seed()])
@pytest.mark.parametrize("tiles", SMALL, ids=["16x32", "32x16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 5, 20])  # 5: shorter than the block
def test_every_rule(
    window: int | None, causal: bool, tiles: Tiles, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(Shape(window=window, causal=causal), tiles, number, monkeypatch)


@pytest.mark.parametrize("number", [seed()])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(heads=2, key_heads=2),
        Shape(heads=6, key_heads=2, block=10, window=30, causal=True),
        Shape(heads=8, key_heads=2, block=16, anchors=6),
        Shape(heads=4, key_heads=1, block=2, anchors=40),
        Shape(heads=1, key_heads=1, block=128, anchors=5, padding=1, window=100),
        Shape(size=128, window=24),
        Shape(padding=0, context=64, block=16, anchors=8),
        Shape(padding=7, anchors=11),
        Shape(context=150, anchors=12, window=None, block=3, causal=True),
    ],
    ids=str,
)
def test_every_shape(shape: Shape, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(shape, SMALL[number % 2], number, monkeypatch)


@pytest.mark.parametrize("number", [seed()])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("window", "causal"), [(None, False), (90, True)])
def test_the_tiles_of_training(
    size: int, window: int | None, causal: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision, with the tiles as they are, long enough for all three parts of an interval."""
    shape = Shape(size=size, block=10, context=700, anchors=61, padding=3, window=window, causal=causal, dtype=HALF)
    check(shape, None, number, monkeypatch)


@pytest.mark.parametrize("number", [seed()])
def test_small_tiles_in_half_precision(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(Shape(dtype=HALF, window=20, causal=True), SMALL[0], number, monkeypatch)


@pytest.mark.parametrize("number", [seed()])
def test_views_of_a_larger_tensor(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values cut from one product each; and a gradient whose elements are one and the same."""
    shape = Shape(heads=6, key_heads=2)
    monkeypatch.setitem(kernels.TILES, (shape.size, 4), SMALL[0])
    generator = torch.Generator().manual_seed(number)
    batch, inputs = make_batch(shape, generator), make_inputs(shape, generator)
    inputs[5] = torch.ones(1, 1, 1, device=DEVICE).expand_as(inputs[5])
    expected = reference(inputs, make_mask(shape, batch))
    wide = torch.cat((inputs[0], inputs[3], inputs[4]), dim=1)
    context = torch.cat((inputs[1], inputs[2]), dim=2)  # head stride 2 D
    views = [wide[:, :6], context[..., :64], context[..., 64:], wide[:, 6:8], wide[:, 8:], inputs[5]]
    assert not any(view.is_contiguous() for view in views)
    compare(run_kernels(views, make_ranges(shape, batch)), expected, torch.float32)


@pytest.mark.parametrize("number", [seed()])
def test_same_inputs_give_the_same_bits(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(dtype=HALF)
    monkeypatch.setitem(kernels.TILES, (shape.size, 2), SMALL[1])
    generator = torch.Generator().manual_seed(number)
    batch, inputs = make_batch(shape, generator), make_inputs(shape, generator)
    seen = make_ranges(shape, batch)
    for first, second in zip(run_kernels(inputs, seen), run_kernels(inputs, seen), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("number", [seed() for _ in range(4)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 20, 1000])
def test_ranges_are_the_mask(window: int | None, causal: bool, number: int) -> None:
    """Row by row, and for every interval a … b of context the draft rows that see some or all of it."""
    shape = Shape(window=window, causal=causal)
    batch = make_batch(shape, torch.Generator().manual_seed(number))
    seen, mask = make_ranges(shape, batch), make_mask(shape, batch)
    to_context, to_draft = mask[:, : shape.context], mask[:, shape.context :]
    place = torch.arange(shape.context, device=DEVICE)
    assert torch.equal((seen.lo[:, None] <= place) & (place < seen.hi[:, None]), to_context)
    row = torch.arange(to_draft.shape[0], device=DEVICE)
    apart = row[None, :] - row[:, None]
    own = (row[:, None] // shape.block == row // shape.block) & (apart.abs() < seen.reach)
    assert torch.equal(own & (apart <= 0) if seen.causal else own, to_draft)
    some, some_stop, full, full_stop = seen.seers.tolist()
    for a in range(shape.context):
        for b in (a + 1, min(a + 16, shape.context), shape.context):
            any_, all_ = to_context[:, a:b].any(1), to_context[:, a:b].all(1)
            assert not any_[: some[a]].any()
            assert not any_[some_stop[b] :].any()
            assert all_[full[b] : full_stop[a]].all()
            whole = all_.view(-1, shape.block).all(1).sum() * shape.block  # blocks all of whose rows see all of it
            assert whole == max(full_stop[a] - full[b], 0)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_nothing_waits_for_the_device() -> None:
    shape, generator = Shape(dtype=HALF, window=20), torch.Generator().manual_seed(0)
    batch, inputs = make_batch(shape, generator), make_inputs(shape, generator)
    run_kernels(inputs, make_ranges(shape, batch))  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_kernels(inputs, make_ranges(shape, batch))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_is_refused() -> None:
    shape = Shape()
    generator = torch.Generator().manual_seed(0)
    *given, _ = make_inputs(shape, generator)
    seen = make_ranges(shape, make_batch(shape, generator))
    queries, context_keys, *rest = given
    with pytest.raises(ValueError, match="head size 32"):
        block_attention(*(tensor[..., :32] for tensor in given), seen)
    with pytest.raises(ValueError, match="context keys"):
        block_attention(queries, context_keys[1:], *rest, seen)
    with pytest.raises(ValueError, match="one dtype"):
        block_attention(queries, context_keys.half(), *rest, seen)
    with pytest.raises(ValueError, match="rows"):
        block_attention(queries[8:], context_keys, *rest, seen)
    with pytest.raises(ValueError, match="16 bytes"):
        block_attention(queries, torch.cat((context_keys, context_keys), dim=2)[..., 1:65], *rest, seen)
    transposed = queries.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="lie together"):
        block_attention(transposed, context_keys, *rest, seen)
    with pytest.raises(ValueError, match="window"):
        ranges(queries, queries, block_size=8, context_rows=1, window=0, causal=True)
