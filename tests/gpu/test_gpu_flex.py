"""Block-sparse attention on a CUDA device: outputs and gradients are those of `dense`, batch after batch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftmill.drafter import flex
from draftmill.drafter.attention import dense
from draftmill.drafter.blocks import Blocks, make_blocks
from draftmill.drafter.config import FULL, SLIDING, DrafterSpec
from draftmill.drafter.model import Attend
from draftmill.records import PADDING_DOCUMENT

pytestmark = pytest.mark.gpu

Batch = tuple[Blocks, Tensor, Tensor]  # blocks, document_ids, position_ids
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # queries, keys, values, gradient of the output

SPEC = DrafterSpec(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    rms_norm_eps=1e-6, rope_theta=10000.0, block_size=16, mask_token_id=1, taps=(1, 3),
    layer_types=(FULL, SLIDING, SLIDING, FULL), layer_causal=(False, True, False, True), sliding_window=200,
    vocab_size=320, num_target_layers=4, max_position_embeddings=4096,
)  # fmt: skip
HEADS = {"small": (4, 2, 16), "three": (9, 3, 64), "large": (32, 8, 128), "alone": (4, 4, 64)}  # Hq, Hkv, D
SEED = random.randrange(2**31)


@pytest.fixture(autouse=True)
def exact_matrix_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def with_heads(name: str) -> DrafterSpec:
    queries, keys, size = HEADS[name]
    return replace(SPEC, num_attention_heads=queries, num_key_value_heads=keys, head_dim=size)


def draw_batch(seed: int, tokens: int, anchors: int) -> Batch:
    """Random documents and anchors; some tokens and some anchors are padding."""
    chance = random.Random(seed)
    used, lengths = tokens - chance.randint(1, tokens // 8), []
    while sum(lengths) < used:
        lengths.append(min(chance.choice([1, 7, tokens // 4, tokens // 2]), used - sum(lengths)))
    padding = tokens - used
    numbers = [torch.full((length,), number) for number, length in enumerate(lengths)]
    documents = torch.cat([*numbers, torch.full((padding,), PADDING_DOCUMENT)]).int()
    positions = torch.cat([*(torch.arange(length) for length in lengths), torch.zeros(padding)]).int()
    chosen = sorted(chance.sample(range(used), anchors - chance.randint(1, anchors // 4)))
    places = torch.tensor(chosen + [-1] * (anchors - len(chosen)))
    blocks = make_blocks(
        torch.zeros(tokens, dtype=torch.int32), torch.ones(tokens, dtype=torch.bool), positions, documents, places,
        block_size=SPEC.block_size, mask_token_id=SPEC.mask_token_id, gamma=7.0,
    )  # fmt: skip
    return blocks.to("cuda"), documents.cuda(), positions.cuda()


def draw_inputs(seed: int, spec: DrafterSpec, batch: Batch, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)
    draft, heads = batch[0].tokens.numel(), (spec.num_attention_heads, spec.num_key_value_heads)
    shapes = [(draft, heads[0]), *[(batch[1].shape[0] + draft, heads[1])] * 2, (draft, heads[0])]
    q, k, v, weight = (
        torch.randn(*shape, spec.head_dim, generator=generator, device="cuda").to(dtype) for shape in shapes
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), weight


def run(attend: Attend, layer: int, inputs: Inputs) -> list[Tensor]:
    """Output and the gradients of queries, keys and values."""
    *leaves, weight = inputs
    out = attend(layer, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def reference(spec: DrafterSpec, batch: Batch, layer: int, inputs: Inputs) -> list[Tensor]:
    """`dense` in float64, on the very same numbers."""
    q, k, v, weight = (x.detach().double() for x in inputs)
    wide = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), weight)
    return run(dense(spec, *batch), layer, wide)


def close(got: list[Tensor], wanted: list[Tensor], most: float) -> None:
    for name, mine, theirs in zip(("output", "dq", "dk", "dv"), got, wanted, strict=True):
        assert mine.shape == theirs.shape
        gap = float((mine.double() - theirs).norm() / theirs.norm())
        assert gap < most, f"{name}: {gap}"  # not true of NaN either


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize(("tokens", "anchors"), [(1024, 64), (1000, 61)])  # with and without cut tiles
@pytest.mark.parametrize("seed", [SEED])
def test_outputs_and_gradients_are_those_of_dense(
    heads: str, dtype: torch.dtype, most: float, tokens: int, anchors: int, seed: int
) -> None:
    torch.compiler.reset()
    spec, batch = with_heads(heads), draw_batch(seed, tokens, anchors)
    attend = flex.flex(spec, *batch)
    for layer in range(spec.layers):
        inputs = draw_inputs(seed + layer, spec, batch, dtype)
        close(run(attend, layer, inputs), reference(spec, batch, layer, inputs), most)


@pytest.mark.parametrize("seed", [SEED])
def test_fewer_draft_tokens_than_a_tile(seed: int) -> None:
    torch.compiler.reset()
    batch = draw_batch(seed, 300, 5)
    inputs = draw_inputs(seed, SPEC, batch, torch.float32)
    close(run(flex.flex(SPEC, *batch), 0, inputs), reference(SPEC, batch, 0, inputs), 1e-5)


@pytest.mark.parametrize("seed", [SEED])
def test_nothing_is_compiled_anew_for_another_batch_or_layer(seed: int) -> None:
    torch.compiler.reset()
    spec = with_heads("three")
    first = draw_batch(seed, 1024, 64)
    run(flex.flex(spec, *first), 0, draw_inputs(seed, spec, first, torch.bfloat16))
    with torch.compiler.set_stance("fail_on_recompile"):
        for turn in range(1, 6):
            batch = draw_batch(seed + turn, 1024, 64)
            attend = flex.flex(spec, *batch)
            for layer in range(spec.layers):
                inputs = draw_inputs(seed + turn, spec, batch, torch.bfloat16)
                close(run(attend, layer, inputs), reference(spec, batch, layer, inputs), 1.5e-2)


def all_layers(spec: DrafterSpec, batch: Batch, inputs: Inputs) -> list[list[Tensor]]:
    attend = flex.flex(spec, *batch)
    return [run(attend, layer, inputs) for layer in range(spec.layers)]


@pytest.mark.parametrize("seed", [SEED])
def test_tables_forward_and_backward_can_be_captured_in_a_graph(seed: int) -> None:
    """Capture forbids any wait for the device; the replay must follow the anchors, not those it was captured with."""
    torch.compiler.reset()
    spec, batch = with_heads("three"), draw_batch(seed, 1024, 64)
    inputs = draw_inputs(seed, spec, batch, torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles forward and backward, and chooses among variants of the small kernels
            all_layers(spec, batch, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = all_layers(spec, batch, inputs)
    for turn in range(1, 4):
        other = draw_batch(seed + turn, 1024, 64)
        fresh = draw_inputs(seed + turn, spec, other, torch.bfloat16)
        replaced = [*batch[0].tensors(), *batch[1:], *inputs]
        with torch.no_grad():
            for held, new in zip(replaced, [*other[0].tensors(), *other[1:], *fresh], strict=True):
                held.copy_(new)
        graph.replay()
        for layer in range(spec.layers):
            close(results[layer], reference(spec, other, layer, fresh), 1.5e-2)
