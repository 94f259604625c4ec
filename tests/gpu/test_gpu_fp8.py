"""The head in fp8 on the tensor cores, at the sizes of real models. Skipped without CUDA."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():  # before triton is imported, which other tests must be the first to do
    pytest.skip("needs CUDA", allow_module_level=True)
pytest.importorskip("triton")

from draftmill.drafter import fp8
from draftmill.drafter.fp8 import Fp8Head, LogitGradient, RowScaled, quantised
from draftmill.drafter.fused_loss import HeadProduct, PlainHead, fused_linear_cross_entropy
from draftmill.drafter.kernels.cross_entropy import cross_entropy_
from draftmill.drafter.kernels.quantise import E4M3
from draftmill.drafter.loss import RowStatistics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="needs fp8 tensor cores"),
]

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def _exact_and_random() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    seed = torch.seed()
    print(f"seed {seed}")  # shown when the test fails
    yield
    torch.cuda.empty_cache()


def make_head(vocabulary: int, hidden_size: int) -> Tensor:
    """As of a model: rows of different norms around a common mean, logits of about the size of the hidden states."""
    head = torch.randn(vocabulary, hidden_size, device=DEVICE, dtype=torch.bfloat16)
    head *= torch.exp(torch.randn(vocabulary, 1, device=DEVICE) * 0.2).bfloat16()
    head += torch.randn(hidden_size, device=DEVICE).bfloat16() * 0.5
    return head.div_(math.sqrt(hidden_size))


def exact(matrix: RowScaled) -> Tensor:
    return matrix.values.float() * matrix.scales[:, None]


def distance(got: Tensor, want: Tensor) -> float:
    """Relative, in the norm; NaN never passes."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def test_the_cast_rounds_as_on_the_cpu() -> None:
    rows = (torch.randn(64, 1024) * torch.logspace(-10, 10, 64)[:, None]).bfloat16()
    got, scales = quantised(rows.to(DEVICE)), rows.float().abs().amax(1) / 448
    want = RowScaled((rows.float() / scales[:, None]).to(E4M3), scales)
    torch.testing.assert_close(got.scales.cpu(), want.scales, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(exact(got).cpu(), exact(want), rtol=2.0**-3, atol=0.0)
    assert bool((got.values.cpu().view(torch.uint8) == want.values.view(torch.uint8)).float().mean() > 0.999)


SHAPES = [(16, 512), (49152, 576), (151936, 1024), (248320, 5120)]


@pytest.mark.parametrize(("vocabulary", "hidden_size"), SHAPES)
@pytest.mark.parametrize("rows", [1, 17, 192, 1009])
def test_logits_are_the_product_of_what_was_rounded(vocabulary: int, hidden_size: int, rows: int) -> None:
    """Any number of rows; sums in short registers (`use_fast_accum`) cost less than the rounding of the result."""
    product = Fp8Head(make_head(vocabulary, hidden_size))
    hidden = torch.randn(rows, hidden_size, device=DEVICE).bfloat16()
    got = torch.full((rows, vocabulary), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    product.logits(hidden, got)
    want = exact(quantised(hidden)) @ exact(product._tokens).T
    print(f"distance {distance(got, want):.1e}")
    assert distance(got, want) < 1e-2


def grad_logits(logits: Tensor) -> tuple[LogitGradient, Tensor, Tensor]:
    """The kernel's gradient for random labels, row 0 without weight; the labels; what it stands for, [C, V] fp32."""
    rows, vocabulary = logits.shape
    labels = torch.randint(vocabulary, (rows,), device=DEVICE)
    weights = torch.rand(rows, device=DEVICE) + 0.1
    weights[0], labels[0], logits[0] = 0.0, -100, torch.nan
    values = torch.empty(rows, vocabulary, dtype=E4M3, device=DEVICE)
    got = LogitGradient(RowScaled(values, torch.empty_like(weights)), torch.empty_like(weights))
    cross_entropy_(logits, labels, weights, torch.empty_like(weights), torch.empty_like(labels), apart=got)
    want = torch.softmax(logits.float(), -1)
    own = labels.clamp_min(0)[:, None]
    want = want.scatter_add(1, own, -torch.ones_like(own, dtype=torch.float)) * weights[:, None]
    want[0] = 0.0
    return got, labels, want


@pytest.mark.parametrize(("vocabulary", "hidden_size"), SHAPES)
@pytest.mark.parametrize("rows", [2, 17, 192, 1009])
def test_gradient_product(vocabulary: int, hidden_size: int, rows: int) -> None:
    """Against the product of what was rounded, and against the exact one; a row without weight is exactly 0."""
    head = make_head(vocabulary, hidden_size)
    product = Fp8Head(head)
    gradient, labels, want = grad_logits((torch.randn(rows, vocabulary, device=DEVICE) * 2).bfloat16())
    got = product.gradient(gradient, labels)
    own_rows = head[labels.clamp_min(0)].float() - product._mean
    rounded = exact(gradient.others) @ exact(product._channels).T + gradient.own[:, None] * own_rows
    true = want @ head.float()
    print(f"distance {distance(got, rounded):.1e} of the rounded, {distance(got, true):.1e} of the exact product")
    assert distance(got, rounded) < 5e-3
    assert distance(got, true) < 4e-2
    assert not got[0].any()
    assert bool(got[1:].any())


@pytest.mark.parametrize("spread", [0.05, 1.0, 3.0])
def test_the_tail_is_not_lost_in_the_sum(spread: float) -> None:
    """All terms of a channel of one sign: summed over V in short registers they would come out too small."""
    vocabulary, hidden_size = 248320, 64
    head = torch.randn(vocabulary, hidden_size, device=DEVICE).bfloat16()
    below = torch.rand(vocabulary, device=DEVICE) < 0.1
    head[:, 0] = torch.where(below, -9.0, 1.0).bfloat16()  # the mean about 0, and no probability where it is below
    product = Fp8Head(head)
    logits = torch.randn(64, vocabulary, device=DEVICE) * spread
    gradient, labels, _ = grad_logits(logits.masked_fill_(below, -1e4).bfloat16())
    gradient.own.zero_()
    got = product.gradient(gradient, labels)[1:, 0].float()
    want = (exact(gradient.others) @ exact(product._channels).T)[1:, 0]
    print(f"off by {float((got / want - 1).abs().max()):.1e}")
    torch.testing.assert_close(got, want, rtol=5e-3, atol=0.0)


def test_kernel_gradient_beyond_two_to_the_31_entries() -> None:
    """The last row of a chunk of more than 2^31 logits is what it is alone."""
    rows, vocabulary = 8704, 248320
    logits = torch.zeros(rows, vocabulary, dtype=torch.bfloat16, device=DEVICE)
    logits[-1] = torch.randn(vocabulary, device=DEVICE).bfloat16()
    labels = torch.full((rows,), 7, device=DEVICE)
    weights = torch.zeros(rows, device=DEVICE)
    weights[-1] = 0.5
    results = []
    for part in (slice(0, rows), slice(rows - 1, rows)):
        own = weights[part].clone()
        values = torch.empty(len(own), vocabulary, dtype=E4M3, device=DEVICE)
        got = LogitGradient(RowScaled(values, torch.empty_like(own)), torch.empty_like(own))
        nll, rank = torch.empty_like(own), torch.empty_like(labels[part])
        cross_entropy_(logits[part], labels[part], own, nll, rank, apart=got)
        results.append((values[-1].view(torch.uint8).clone(), got.others.scales[-1], got.own[-1]))
        if len(own) > 1:
            assert not values[:-1].view(torch.uint8).any()
    for whole, alone in zip(*results, strict=True):
        assert torch.equal(whole, alone)


class Case:
    """Hidden states whose logits have some candidates above a background, labels drawn from their softmax."""

    def __init__(self, head: Tensor, rows: int, supervised: int, spread: float = 1.5, confidence: float = 16.0) -> None:
        candidates = torch.randint(len(head), (rows, 6), device=DEVICE)
        centred = head[candidates].float() - head.float().mean(0)
        centred = centred / centred.norm(dim=-1, keepdim=True)
        hidden = torch.randn(rows, head.shape[1], device=DEVICE) * spread
        hidden += torch.einsum("rc,rch->rh", torch.rand(rows, 6, device=DEVICE) * confidence, centred)
        self.hidden = hidden.bfloat16()
        logits = self.hidden.float() @ head.float().T
        self.labels = torch.multinomial(torch.softmax(logits, -1), 1).squeeze(-1)
        self.weights = torch.zeros(rows, device=DEVICE)
        self.weights[torch.randperm(rows, device=DEVICE)[:supervised]] = 1.0
        self.weights *= torch.rand(rows, device=DEVICE) + 0.1
        idle = self.weights == 0
        self.hidden = self.hidden.masked_fill(idle[:, None], torch.nan).requires_grad_()
        self.labels = self.labels.masked_fill(idle, -100)


def loss_and_gradient(
    data: Case, head: Tensor, product: HeadProduct | Fp8Head, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor, RowStatistics]:
    hidden = data.hidden if hidden is None else hidden
    loss, stats = fused_linear_cross_entropy(
        hidden, head, data.labels, data.weights, rows=1100, chunk_rows=400, head_product=product
    )
    return loss.detach(), torch.autograd.grad(loss, hidden)[0], stats


@pytest.mark.parametrize(("vocabulary", "hidden_size"), [(49152, 576), (151936, 2048)])
def test_loss_and_gradient_are_near_those_of_float32(vocabulary: int, hidden_size: int) -> None:
    head = make_head(vocabulary, hidden_size)
    data = Case(head, rows=1500, supervised=1050)
    loss, gradient, stats = loss_and_gradient(data, head, Fp8Head(head))
    whole = data.hidden.detach().float().requires_grad_()
    want, want_gradient, want_stats = loss_and_gradient(data, head.float(), PlainHead(head.float()), whole)
    chosen = data.weights != 0
    got, true = gradient[chosen].float(), want_gradient[chosen]
    cosine = float(torch.cosine_similarity(got.flatten(), true.flatten(), dim=0))
    agreed = float(((stats.rank == 0) == (want_stats.rank == 0))[chosen].float().mean())
    nats = float(want / data.weights.sum())
    print(f"{nats:.2f} nats a row, off by {float(loss / want) - 1:+.1e}; cosine {cosine:.5f}; top-1 {agreed:.3f}")
    torch.testing.assert_close(loss, want, rtol=1e-2, atol=0.0)
    assert cosine > 0.999
    torch.testing.assert_close(got.norm(), true.norm(), rtol=2e-2, atol=0.0)
    assert agreed > 0.9
    assert not gradient[~chosen].any()


def warmed(step: Callable[[], object]) -> None:
    """Kernels compiled and libraries set up, beside the stream that captures."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def test_nothing_waits_for_the_device() -> None:
    head = make_head(49152, 576)
    data, product = Case(head, rows=1500, supervised=1050), Fp8Head(head)
    warmed(lambda: loss_and_gradient(data, head, product))
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_and_gradient(data, head, product)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured_in_a_graph() -> None:
    """Replays with other inputs give what a call with them gives."""
    head = make_head(49152, 576)
    product = Fp8Head(head)
    cases = [Case(head, rows=1500, supervised=count) for count in (1050, 300)]
    live = Case(head, rows=1500, supervised=1050)
    warmed(lambda: loss_and_gradient(live, head, product))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, gradient, stats = loss_and_gradient(live, head, product)
    for data in cases:
        with torch.no_grad():
            for name in ("hidden", "labels", "weights"):
                getattr(live, name).copy_(getattr(data, name))
        graph.replay()
        want, want_gradient, want_stats = loss_and_gradient(data, head, product)
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(gradient, want_gradient, rtol=1e-2, atol=1e-4)
        assert torch.equal(stats.nll, want_stats.nll)
        assert torch.equal(stats.rank, want_stats.rank)
        assert not gradient[data.weights == 0].any()


def test_memory_of_construction() -> None:
    head = make_head(131072, 4096)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    product = Fp8Head(head)
    kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    copies, slab_bytes = 2 * head.numel(), fp8.SLAB_ROWS * head.shape[1] * 4
    assert isinstance(product, Fp8Head)
    assert copies <= kept < copies + 8 * sum(head.shape)
    assert peak < copies + 6 * slab_bytes


def milliseconds(step: Callable[[], object]) -> float:
    for _ in range(3):
        step()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(10):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 10


@pytest.mark.slow
def test_faster_than_bf16() -> None:
    """A chunk of the 27B shape: both products, and the kernel between them."""
    rows, vocabulary, hidden_size = 4096, 248320, 5120
    head = make_head(vocabulary, hidden_size)
    plain, product = PlainHead(head), Fp8Head(head)
    hidden = torch.randn(rows, hidden_size, device=DEVICE).bfloat16()
    logits = torch.empty(rows, vocabulary, dtype=torch.bfloat16, device=DEVICE)
    labels, weights = torch.randint(vocabulary, (rows,), device=DEVICE), torch.ones(rows, device=DEVICE)
    nll, rank, buffer = torch.empty_like(weights), torch.empty_like(labels), product.gradient_buffer(rows)
    times = {
        "logits bf16": milliseconds(lambda: plain.logits(hidden, logits)),
        "logits fp8": milliseconds(lambda: product.logits(hidden, logits)),
        "kernel fp8": milliseconds(lambda: cross_entropy_(logits, labels, weights, nll, rank, apart=buffer)),
        "gradient fp8": milliseconds(lambda: product.gradient(buffer, labels)),
        "gradient bf16": milliseconds(lambda: plain.gradient(logits)),
        "kernel bf16": milliseconds(lambda: cross_entropy_(logits, labels, weights, nll, rank)),
    }
    print(", ".join(f"{name} {time:.2f} ms" for name, time in times.items()))
    bf16, in_fp8 = (sum(time for name, time in times.items() if name.endswith(kind)) for kind in ("bf16", "fp8"))
    assert in_fp8 < 0.75 * bf16
