"""Attention kernels against softmax in float64 under the mask of `attention.visible`."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace

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


@pytest.fixture
def number() -> int:
    """A fresh seed, shown when the test fails."""
    value = random.randrange(2**31)
    print("number", value)
    return value


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
    cuts: tuple[int, int, int] | None = None  # first rows of the documents but one; drawn if not given


def make_batch(shape: Shape, generator: torch.Generator) -> Batch:
    """Documents of random length. Some anchors are drawn, some forced: at place 0 of a document, its neighbour (closer
    than a block), and the last row of the document before, so that a tile of queries spans the boundary."""
    total = shape.context
    drawn_cuts = (torch.randperm(total - 4, generator=generator)[:3] + 2).sort().values
    cuts = drawn_cuts if shape.cuts is None else torch.tensor(shape.cuts)
    document_ids = (torch.arange(total)[:, None] >= cuts[None, :]).sum(1)
    starts = torch.cat((torch.zeros(1, dtype=torch.long), cuts))
    position_ids = torch.arange(total) - starts[document_ids]
    boundary = int(cuts[1])
    forced = {0, boundary - 1, boundary, min(boundary + 1, total - 1)}
    drawn = [p for p in torch.randperm(total, generator=generator).tolist() if p not in forced]
    number = shape.anchors - shape.padding
    chosen = sorted(forced | set(drawn[: max(number - len(forced), 0)]))[:number]
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
        worst, largest = (mine.double() - theirs).abs().max().item(), theirs.abs().max().item()
        assert worst <= TOLERANCE[dtype] * largest, f"{name}: off by {worst:.2e} of {largest:.2e}"  # false for NaN


def check(shape: Shape, tiles: Tiles | None, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(number)
    if tiles is not None:
        monkeypatch.setitem(kernels.TILES, (shape.size, shape.dtype.itemsize), tiles)
    batch, inputs = make_batch(shape, generator), make_inputs(shape, generator)
    compare(run_kernels(inputs, make_ranges(shape, batch)), reference(inputs, make_mask(shape, batch)), shape.dtype)


@pytest.mark.parametrize("tiles", SMALL, ids=["16x32", "32x16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 5, 20])  # 5: shorter than the block
def test_every_rule(
    window: int | None, causal: bool, tiles: Tiles, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(Shape(window=window, causal=causal), tiles, number, monkeypatch)


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
        Shape(padding=10, anchors=11),  # the only block stands at row 0: the context is seen by none
        Shape(padding=5, anchors=5, window=5),
        Shape(context=150, anchors=12, window=None, block=3, causal=True),
    ],
    ids=str,
)
def test_every_shape(shape: Shape, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(shape, SMALL[number % 2], number, monkeypatch)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("window", "causal"), [(None, False), (90, True)])
def test_the_tiles_of_training(
    size: int, window: int | None, causal: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision, with the tiles as they are, long enough for all three parts of an interval."""
    shape = Shape(size=size, block=10, context=700, anchors=61, padding=3, window=window, causal=causal, dtype=HALF)
    check(shape, None, number, monkeypatch)


@pytest.mark.parametrize(
    ("block", "window", "causal"), [(2, 3, True), (8, None, True), (10, 9, False), (16, None, False)]
)
def test_less_than_one_tile_of_training(
    block: int, window: int | None, causal: bool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer context rows, and draft rows, than the tiles as they are; but for 16, no multiples of 16."""
    shape = Shape(
        heads=4, block=block, context=19, anchors=5, padding=1, window=window, causal=causal, dtype=HALF
    )  # fmt: skip
    check(shape, None, number, monkeypatch)


def test_small_tiles_in_half_precision(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(Shape(dtype=HALF, window=20, causal=True), SMALL[0], number, monkeypatch)


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


def test_views_as_the_model_has_them(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are parts of the rows of the products they come from; queries and keys have memory of their own."""
    shape = Shape(heads=3, key_heads=3, dtype=HALF, window=20)
    monkeypatch.setitem(kernels.TILES, (shape.size, 2), SMALL[number % 2])
    generator = torch.Generator().manual_seed(number)
    batch, inputs = make_batch(shape, generator), make_inputs(shape, generator)
    context_values = torch.stack((inputs[1], inputs[2]), dim=1).unbind(1)[1]  # of [T, 2, Hkv, D]
    draft_values = torch.cat((inputs[0], inputs[3], inputs[4]), dim=1)[:, 6:]  # of [M, Hq + 2 Hkv, D]
    views = [*inputs[:2], context_values, inputs[3], draft_values, inputs[5]]
    expected = reference(inputs, make_mask(shape, batch))
    compare(run_kernels(views, make_ranges(shape, batch)), expected, shape.dtype)


def test_same_inputs_give_the_same_bits(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(dtype=HALF)
    monkeypatch.setitem(kernels.TILES, (shape.size, 2), SMALL[1])
    generator = torch.Generator().manual_seed(number)
    batch, inputs = make_batch(shape, generator), make_inputs(shape, generator)
    seen = make_ranges(shape, batch)
    for first, second in zip(run_kernels(inputs, seen), run_kernels(inputs, seen), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("again", range(4))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 20, 1000])
def test_ranges_are_the_mask(window: int | None, causal: bool, again: int, number: int) -> None:
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
        assert some[a] == (seen.hi <= a).sum()  # as tight as they can be for any b, or for any a
        assert some_stop[a] == (seen.lo[:: shape.block] < a).sum() * shape.block
        for b in (a + 1, min(a + 16, shape.context), shape.context):
            any_, all_ = to_context[:, a:b].any(1), to_context[:, a:b].all(1)
            assert not any_[: some[a]].any()
            assert not any_[some_stop[b] :].any()
            assert all_[full[b] : full_stop[a]].all()
            whole = all_.view(-1, shape.block).all(1).sum() * shape.block  # blocks all of whose rows see all of it
            assert whole == max(full_stop[a] - full[b], 0)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize(("window", "causal"), [(2048, True), (None, False)])
def test_the_size_of_training(window: int | None, causal: bool, number: int) -> None:
    """256 blocks over 4,096 rows, one document longer than the window; the reference head by head, to save memory."""
    shape = Shape(
        heads=32, key_heads=8, size=128, block=16, context=4096, anchors=256, padding=5, window=window, causal=causal,
        dtype=HALF, cuts=(300, 3500, 3600),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(number)
    batch, inputs = make_batch(shape, generator), make_inputs(shape, generator)
    got, mask = run_kernels(inputs, make_ranges(shape, batch)), make_mask(shape, batch)
    for head in range(shape.key_heads):
        compare(heads_of(got, head, shape), reference(heads_of(inputs, head, shape), mask), shape.dtype)


def heads_of(tensors: list[Tensor], key_head: int, shape: Shape) -> list[Tensor]:
    """One key-value head of each tensor, or the query heads that share it."""
    counts = [tensor.shape[1] // shape.key_heads for tensor in tensors]
    return [tensor.narrow(1, key_head * n, n) for tensor, n in zip(tensors, counts, strict=True)]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_a_captured_graph_follows_its_inputs(number: int) -> None:
    """Ranges, forward and backward pass in one graph; every replay has other anchors, documents and numbers."""
    shape = Shape(
        heads=8, key_heads=2, size=128, block=16, context=300, anchors=21, window=90, causal=True, dtype=HALF
    )  # fmt: skip
    generator = torch.Generator().manual_seed(number)
    batch, buffers = make_batch(shape, generator), make_inputs(shape, generator)

    def step() -> list[Tensor]:
        given = [tensor.detach().requires_grad_() for tensor in buffers[:5]]
        out = block_attention(*given, make_ranges(shape, batch))
        return [out.detach(), *torch.autograd.grad(out, given, buffers[5])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # kernels are compiled outside of the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for padding in (0, 3, shape.anchors):
        other = make_batch(replace(shape, padding=padding), generator)
        inputs = make_inputs(shape, generator)
        for mine, new in zip(
            (batch[0].anchors, batch[3], *buffers), (other[0].anchors, other[3], *inputs), strict=True
        ):
            mine.copy_(new)
        graph.replay()
        compare(results, reference(inputs, make_mask(shape, other)), shape.dtype)


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
