"""The fixed-shape loss against `linear_cross_entropy` on the supervised rows; the kernel interpreted without a GPU."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from draftmill.drafter import fused_loss
from draftmill.drafter.fused_loss import PlainHead, fused_linear_cross_entropy
from draftmill.drafter.loss import RowStatistics, linear_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float32]
ALL, HIDDEN, VOCABULARY, CHUNK = 40, 16, 301, 7
SUPERVISED = 23


@dataclass
class Case:
    hidden: Tensor
    head: Tensor
    labels: Tensor
    weights: Tensor

    def chosen(self) -> Tensor:
        return (self.weights != 0).nonzero().squeeze(-1)


def case(dtype: torch.dtype, supervised: int = SUPERVISED) -> Case:
    seed = random.randrange(2**31)
    print(f"seed {seed}")  # shown when the test fails
    torch.manual_seed(seed)
    weights = torch.zeros(ALL)
    weights[torch.randperm(ALL)[:supervised]] = torch.rand(supervised) + 0.1
    labels = torch.where(weights > 0, torch.randint(VOCABULARY, (ALL,)), -100)
    # Whole numbers: the logits are exact in every dtype and order of summation, so ranks must agree, ties included.
    hidden = torch.randint(-1, 2, (ALL, HIDDEN)).to(dtype)
    hidden[weights == 0] = torch.nan
    head = torch.randint(-1, 2, (VOCABULARY, HIDDEN)).to(dtype)
    return Case(hidden.to(DEVICE).requires_grad_(), head.to(DEVICE), labels.to(DEVICE), weights.to(DEVICE))


def fused(data: Case, rows: int, chunk_rows: int = CHUNK) -> tuple[Tensor, RowStatistics]:
    return fused_linear_cross_entropy(
        data.hidden, data.head, data.labels, data.weights, rows=rows, chunk_rows=chunk_rows
    )


def expected(data: Case, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, nll, rank and gradient by the plain loss on the supervised rows, spread over all rows."""
    chosen = data.chosen()
    hidden = data.hidden.detach()[chosen].requires_grad_()
    loss, stats = linear_cross_entropy(
        hidden, data.head, data.labels[chosen], data.weights[chosen], chunk_rows=len(chosen)
    )
    (loss * scale).backward()
    assert hidden.grad is not None
    nll = torch.zeros_like(data.weights).index_copy(0, chosen, stats.nll)
    rank = torch.zeros_like(data.labels).index_copy(0, chosen, stats.rank)
    gradient = torch.zeros_like(data.hidden).detach().index_copy(0, chosen, hidden.grad)
    return loss.detach(), nll, rank, gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [SUPERVISED, 29, ALL, 2 * ALL])
@pytest.mark.parametrize("chunk_rows", [1, CHUNK, 8, 100])
def test_agrees_with_the_plain_loss(dtype: torch.dtype, rows: int, chunk_rows: int) -> None:
    """Capacity exactly needed, larger, of all rows and beyond; chunks of one row, uneven, of all."""
    data = case(dtype)
    want_loss, want_nll, want_rank, want_gradient = expected(data, scale=0.25)
    loss, stats = fused(data, rows, chunk_rows)
    (loss * 0.25).backward()
    assert data.hidden.grad is not None
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.detach(), want_loss, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(stats.nll, want_nll, rtol=1e-5, atol=1e-5)
    assert torch.equal(stats.rank, want_rank)
    # bf16: the interpreter cuts gradients of the logits off where torch rounds them; fp32: another order of summation.
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(data.hidden.grad, want_gradient, rtol=tolerance, atol=tolerance / 4)
    assert not data.hidden.grad[data.weights == 0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_too_small_a_capacity_is_nan(dtype: torch.dtype) -> None:
    data = case(dtype)
    loss, _ = fused(data, SUPERVISED - 1)
    loss.backward()
    assert data.hidden.grad is not None
    assert bool(loss.isnan())
    assert bool(data.hidden.grad[data.chosen()].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_supervised(dtype: torch.dtype) -> None:
    data = case(dtype, supervised=0)
    loss, stats = fused(data, SUPERVISED)
    loss.backward()
    assert data.hidden.grad is not None
    assert loss.item() == 0.0
    assert torch.equal(data.hidden.grad, torch.zeros_like(data.hidden))
    assert not stats.nll.any()
    assert not stats.rank.any()


def test_everything_supervised() -> None:
    data = case(torch.float32, supervised=ALL)
    want_loss, want_nll, _, want_gradient = expected(data, scale=1.0)
    loss, stats = fused(data, ALL)
    loss.backward()
    torch.testing.assert_close(loss.detach(), want_loss, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(stats.nll, want_nll, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(data.hidden.grad, want_gradient, rtol=1e-5, atol=1e-5)


class Counting:
    """The plain products, and what was asked of them."""

    def __init__(self, head: Tensor) -> None:
        self.plain = PlainHead(head)
        self.buffers: list[tuple[int, int]] = []
        self.gradients: list[tuple[int, int]] = []

    def logits(self, rows: Tensor, out: Tensor) -> None:
        self.buffers.append((out.data_ptr(), out.shape[0]))
        self.plain.logits(rows, out)

    def gradient(self, grad_logits: Tensor) -> Tensor:
        self.gradients.append((grad_logits.data_ptr(), grad_logits.shape[0]))
        return self.plain.gradient(grad_logits)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("supervised", [0, SUPERVISED])
def test_two_products_per_chunk_in_one_buffer(wanted: bool, supervised: int) -> None:
    """Whatever is supervised, the same products of the same shapes; the second only where a gradient is wanted."""
    data = case(torch.float32, supervised)
    product = Counting(data.head)
    with torch.set_grad_enabled(wanted):
        loss, _ = fused_linear_cross_entropy(
            data.hidden,
            data.head,
            data.labels,
            data.weights,
            rows=SUPERVISED,
            chunk_rows=CHUNK,
            head_product=product,
        )
    assert loss.requires_grad == wanted
    assert [rows for _, rows in product.buffers] == [7, 7, 7, 2]
    assert len({pointer for pointer, _ in product.buffers}) == 1
    assert product.gradients == (product.buffers if wanted else [])


def test_same_loss_without_gradient() -> None:
    data = case(torch.bfloat16)
    loss, stats = fused(data, SUPERVISED)
    data.hidden = data.hidden.detach()
    plain, plain_stats = fused(data, SUPERVISED)
    assert not plain.requires_grad
    assert torch.equal(loss.detach(), plain)
    assert torch.equal(stats.nll, plain_stats.nll)
    assert torch.equal(stats.rank, plain_stats.rank)


class Large(TorchDispatchMode):
    """Remembers every storage of at least one chunk × V that any operation writes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().nbytes() >= CHUNK * VOCABULARY * out.element_size():
            self.seen[out.untyped_storage().data_ptr()] = out.untyped_storage()
        return out


def test_one_buffer_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of chunk × V besides the buffer that every chunk reuses, and the head, which is only read."""
    data = case(torch.float32)
    monkeypatch.setattr(fused_loss, "cross_entropy_", lambda *_, **__: None)  # interpreted, it makes copies
    with Large() as large:
        fused(data, SUPERVISED)
    assert len(large.seen.keys() - {data.head.untyped_storage().data_ptr()}) == 1


@pytest.mark.parametrize(("rows", "chunk_rows"), [(0, 4), (4, 0)])
def test_refuses_empty_capacity_and_chunks(rows: int, chunk_rows: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        fused(case(torch.float32), rows, chunk_rows)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_captured_in_a_graph() -> None:
    """No host synchronisation, no shape that depends on the data: replays with other weights give their own result."""
    first, second = case(torch.bfloat16), case(torch.bfloat16, supervised=11)
    live = Case(*(tensor.detach().clone() for tensor in (first.hidden, first.head, first.labels, first.weights)))
    live.hidden.requires_grad_()

    def step() -> tuple[Tensor, Tensor, RowStatistics]:
        loss, stats = fused(live, SUPERVISED)
        return loss, torch.autograd.grad(loss, live.hidden)[0], stats

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compile before the capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, gradient, stats = step()
    for data in (first, second):
        with torch.no_grad():
            for name in ("hidden", "head", "labels", "weights"):
                getattr(live, name).copy_(getattr(data, name))
        graph.replay()
        want, want_stats = fused(data, SUPERVISED)
        want.backward()
        torch.testing.assert_close(loss, want.detach(), rtol=1e-6, atol=0.0)
        assert torch.equal(stats.nll, want_stats.nll)
        assert torch.equal(stats.rank, want_stats.rank)
        torch.testing.assert_close(gradient, data.hidden.grad, rtol=1e-2, atol=1e-3)
