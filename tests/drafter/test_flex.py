"""The tables of the block-sparse attention say exactly what `visible` says, and attention by them is `dense`."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
from test_drafter_reference import BASE
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from draftmill.drafter import flex
from draftmill.drafter.attention import dense, kinds, visible
from draftmill.drafter.blocks import Blocks, make_blocks
from draftmill.drafter.config import FULL, SLIDING
from draftmill.records import PADDING_DOCUMENT

Batch = tuple[Blocks, Tensor, Tensor]  # blocks, document_ids, position_ids

# fresh in every run, the same in all its processes
SEEDS = [
    random.Random(f"{os.environ.get('PYTEST_XDIST_TESTRUNUID', random.random())} {n}").randrange(2**31)
    for n in range(4)
]
KINDS = [(window, causal) for window in (None, 1, 3, 40, 300) for causal in (False, True)]


def batch_of(lengths: list[int], padding: int, anchors: list[int], size: int) -> Batch:
    """Documents one after another, then padding tokens. Anchors as given, −1 at the end for padding."""
    ids = [torch.full((length,), number) for number, length in enumerate(lengths)]
    documents = torch.cat([*ids, torch.full((padding,), PADDING_DOCUMENT)]).int()
    positions = torch.cat([*(torch.arange(length) for length in lengths), torch.zeros(padding)]).int()
    total = documents.shape[0]
    tokens, mask = torch.zeros(total, dtype=torch.int32), torch.ones(total, dtype=torch.bool)
    blocks = make_blocks(
        tokens, mask, positions, documents, torch.tensor(anchors), block_size=size, mask_token_id=1, gamma=4.0
    )
    return blocks, documents, positions


def draw(seed: int, size: int) -> Batch:
    """Random documents; anchors anywhere in them: close together, at a document's first token, some missing."""
    chance = random.Random(seed)
    lengths = [chance.choice([1, 2, chance.randint(3, 60), chance.randint(61, 700)]) for _ in range(8)]
    starts = [sum(lengths[:number]) for number in range(8)]
    most = max(4, 800 // size)  # anchors; the tests look at every entry
    cluster = chance.randrange(sum(lengths))
    near = range(cluster, min(cluster + most // 3, sum(lengths)))
    spread = chance.sample(range(sum(lengths)), min(chance.randint(2, most), sum(lengths)))
    anchors = sorted({*spread, *near, *chance.sample(starts, 2)})
    return batch_of(lengths, chance.randrange(200), anchors + [-1] * chance.randrange(most // 2), size)


def keys_of(batch: Batch) -> int:
    return batch[1].shape[0] + batch[0].tokens.numel()


def mask_of(batch: Batch, window: int | None, causal: bool) -> BlockMask:
    blocks, _, positions = batch
    seen = flex.bounds(blocks, positions, window=window, causal=causal)
    return flex.block_mask(seen, keys_of(batch), blocks.tokens.shape[1])


def wanted_of(batch: Batch, window: int | None, causal: bool) -> Tensor:
    return visible(*batch, window=window, causal=causal)


def table(counts: Tensor | None, columns: Tensor | None) -> Tensor:
    """What a counted list of columns says, as a bool table. No column may be named twice."""
    assert counts is not None
    assert columns is not None
    assert counts.dtype == columns.dtype == torch.int32
    said = torch.zeros(columns.shape[2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        named = columns[0, 0, row, :count].tolist()
        assert named == sorted(set(named))
        said[row, named] = True
    return said


def whole(tiles: Tensor, shape: torch.Size) -> Tensor:
    """A table of tiles, every entry spread over its tile, cut to the shape of the mask."""
    return tiles.repeat_interleave(flex.TILE, 0).repeat_interleave(flex.TILE, 1)[: shape[0], : shape[1]]


def by_definition(wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles with anything visible, and tiles with everything visible, the rows and keys they lack counting as not."""
    rows, keys = (-(-length // flex.TILE) for length in wanted.shape)
    padded = F.pad(wanted, (0, keys * flex.TILE - wanted.shape[1], 0, rows * flex.TILE - wanted.shape[0]))
    by_tile = padded.view(rows, flex.TILE, keys, flex.TILE)
    return by_tile.any(3).any(1), by_tile.all(3).all(1)


def check(batch: Batch, window: int | None, causal: bool) -> Tensor:
    """All that a mask must be. Returns the table of its full tiles."""
    mask, wanted = mask_of(batch, window, causal), wanted_of(batch, window, causal)
    assert mask.shape == (1, 1, *wanted.shape)
    partial, full = table(mask.kv_num_blocks, mask.kv_indices), table(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partial & full).any()
    assert wanted[whole(full, wanted.shape)].all(), "a full tile holds something invisible"
    rows, keys = torch.arange(wanted.shape[0])[:, None], torch.arange(wanted.shape[1])[None, :]
    zero = torch.zeros((), dtype=torch.long)
    by_entry = mask.mask_mod(zero, zero, rows, keys)
    expanded = whole(full, wanted.shape) | (whole(partial, wanted.shape) & by_entry)
    assert torch.equal(expanded, wanted)
    touched, covered = by_definition(wanted)
    assert torch.equal(partial | full, touched), "a tile without anything visible is computed"
    assert torch.equal(full, covered), "a full tile passes for a partial one"
    assert torch.equal(table(mask.q_num_blocks, mask.q_indices), partial.T)
    assert torch.equal(table(mask.full_q_num_blocks, mask.full_q_indices), full.T)
    return full


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [5, 16, 24, 128])
def test_the_tables_expand_to_the_visible_entries(seed: int, size: int) -> None:
    batch = draw(seed, size)
    for window, causal in KINDS:
        check(batch, window, causal)


def test_long_documents_have_full_tiles_and_windows_have_fewer() -> None:
    batch = batch_of([700, 900], 0, list(range(620, 636)) + list(range(1400, 1450)), 16)
    assert int(check(batch, None, False).sum()) > int(check(batch, 300, True).sum()) > 0


def test_a_context_shorter_than_a_tile() -> None:
    for window, causal in KINDS:
        check(batch_of([9, 4], 2, [0, 3, 9, 11, -1], 7), window, causal)


def test_the_tile_of_both_the_last_context_and_the_first_draft_tokens_is_named_once() -> None:
    batch = batch_of([200], 0, [199, *[-1] * 3], 16)  # keys 128 … 255: 72 context rows, then 56 draft rows
    partial = table(*flex.ordered(flex.tiles(flex.bounds(batch[0], batch[2], window=None, causal=False), 264, 16)[0]))
    assert partial.tolist() == [[True, True, True]]
    check(batch, None, False)


@pytest.mark.parametrize("anchors", [[0], [-1] * 9, [0, 128, 256]])
def test_blocks_without_context_see_themselves(anchors: list[int]) -> None:
    batch = batch_of([128, 128, 128], 0, anchors, 16)
    assert not check(batch, None, False).any()
    assert not wanted_of(batch, None, False)[:, : 3 * 128].any()


def test_a_block_as_large_as_a_tile_is_one_full_tile_unless_it_is_causal() -> None:
    batch = batch_of([512], 0, [300, 301], 128)
    for window, causal in KINDS:
        check(batch, window, causal)
    full = check(batch, None, False)
    assert full.tolist() == [[True, True, False, False, True, False], [True, True, False, False, False, True]]


LAYERED = replace(
    BASE, num_attention_heads=6, num_key_value_heads=2, head_dim=16, block_size=16, layer_types=(FULL, SLIDING, FULL),
    layer_causal=(False, True, True), sliding_window=40,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_attention_by_the_tables_is_dense_attention(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "kernel", lambda: flex_attention)  # plain torch: it needs no compiler
    batch = draw(seed, LAYERED.block_size)
    fresh = torch.Generator().manual_seed(seed)
    q = torch.randn(batch[0].tokens.numel(), 6, 16, generator=fresh)
    k, v = (torch.randn(keys_of(batch), 2, 16, generator=fresh) for _ in range(2))
    got, wanted = flex.flex(LAYERED, *batch), dense(LAYERED, *batch)
    for layer in range(LAYERED.layers):
        out = got(layer, q, k, v)
        assert out.shape == q.shape
        torch.testing.assert_close(out, wanted(layer, q, k, v), rtol=1e-5, atol=1e-5)


def test_the_kernel_is_made_once_for_layers_of_every_kind_and_for_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True, backend=count)
    monkeypatch.setattr(flex, "kernel", lambda: compiled)
    assert len(set(kinds(LAYERED))) == 3
    for _ in range(4):
        anchors = sorted(random.sample(range(400), 12)) + [-1] * 4
        first = random.randrange(1, 300)
        batch = batch_of([first, 400 - first], 30, anchors, 16)
        attend = flex.flex(LAYERED, *batch)
        q, k = torch.randn(batch[0].tokens.numel(), 6, 16), torch.randn(keys_of(batch), 2, 16)
        for layer in range(LAYERED.layers):
            attend(layer, q, k, k)
    assert len(graphs) == 1
