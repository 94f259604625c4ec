"""The cross-entropy kernel against float64; interpreted where there is no GPU."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from draftmill.drafter.kernels import cross_entropy
from draftmill.drafter.kernels.cross_entropy import cross_entropy_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float32]
BF16_STEP = 2**-8 if DEVICE == "cuda" else 2**-7  # the interpreter cuts off where a GPU rounds to the nearest
ROWS = 6
BLOCK = 256  # several steps per row, also with the small vocabularies of these tests


@pytest.fixture(autouse=True)
def _several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "BLOCK", BLOCK)
    monkeypatch.setattr(cross_entropy, "NUM_WARPS", 1)


@pytest.fixture
def generator() -> torch.Generator:
    seed = random.randrange(2**31)
    print(f"seed {seed}")  # shown when the test fails
    return torch.Generator().manual_seed(seed)


def reference(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """nll, rank and gradient, row by row in float64; what has weight 0 is zero whatever it holds."""
    nll, rank, gradient = torch.zeros(len(labels)).double(), torch.zeros(len(labels)).long(), []
    for row, (values, label, weight) in enumerate(
        zip(logits.double().cpu(), labels.tolist(), weights.tolist(), strict=True)
    ):
        gradient.append(torch.zeros_like(values))
        if weight == 0:
            continue
        logp = values - torch.logsumexp(values, dim=0)
        nll[row] = -logp[label]
        order = sorted(range(len(values)), key=lambda token: (-float(values[token]), token))
        rank[row] = order.index(label)
        gradient[-1] = weight * logp.exp()
        gradient[-1][label] -= weight
    return nll, rank, torch.stack(gradient)


def run(logits: Tensor, labels: Tensor, weights: Tensor, gradient: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel on a copy of the logits that keeps their strides; outputs start as rubbish."""
    storage = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=DEVICE).copy_(logits)
    nll = torch.full((len(labels),), torch.nan, device=DEVICE)
    rank = torch.full((len(labels),), -7, device=DEVICE)
    cross_entropy_(storage, labels.to(DEVICE), weights.to(DEVICE), nll, rank, gradient=gradient)
    return nll.cpu(), rank.cpu(), storage.cpu()


def check(logits: Tensor, labels: Tensor, weights: Tensor) -> None:
    nll, rank, gradient = run(logits, labels, weights)
    want_nll, want_rank, want_gradient = reference(logits, labels, weights)
    # Exponents are rounded to fp32, so sums are good to 2^-24 of the largest logit, and to a few roundings.
    size = max(1.0, float(logits[weights != 0].float().abs().max())) if bool((weights != 0).any()) else 1.0
    torch.testing.assert_close(nll.double(), want_nll, rtol=2e-6, atol=4e-7 * size)
    assert torch.equal(rank, want_rank)
    rounding = BF16_STEP if logits.dtype == torch.bfloat16 else 4e-6
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=rounding + 1e-6 * size, atol=2e-7)


def inputs(generator: torch.Generator, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    logits = (torch.randn(ROWS, vocabulary, generator=generator) * 3).to(dtype)
    labels = torch.randint(vocabulary, (ROWS,), generator=generator)
    return logits, labels, torch.rand(ROWS, generator=generator) + 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [5, BLOCK, 1003, 4 * BLOCK])
def test_random_logits(generator: torch.Generator, vocabulary: int, dtype: torch.dtype) -> None:
    check(*inputs(generator, vocabulary, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_block_size_that_is_used(
    generator: torch.Generator, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    check(*inputs(generator, 3 * cross_entropy.BLOCK + 1, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_labels_at_the_ends_of_vocabulary_and_blocks(generator: torch.Generator, dtype: torch.dtype) -> None:
    logits, _, weights = inputs(generator, 1003, dtype)
    check(logits, torch.tensor([0, 1002, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]), weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [[0.0], [-0.0, 0.0], [2.5], [-2.5], [-1.0, 0.0, 1.0]])
def test_ties_go_to_the_lower_id(generator: torch.Generator, values: list[float], dtype: torch.dtype) -> None:
    pick = torch.randint(len(values), (ROWS, 1003), generator=generator)
    logits = torch.tensor(values)[pick].to(dtype)
    labels = torch.tensor([0, 1002, BLOCK - 1, BLOCK, 700, 3])
    check(logits, labels, torch.ones(ROWS))


def test_near_ties_of_bf16(generator: torch.Generator) -> None:
    """Labels at the top of the row, where bf16 has many equal logits, and neighbours one step away."""
    logits = (16 + torch.randn(ROWS, 1003, generator=generator) / 8).bfloat16()
    labels = logits.float().topk(20, dim=1).indices[:, -1].contiguous()
    check(logits, labels, torch.ones(ROWS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradient", [True, False])
def test_rows_of_weight_zero_are_not_read(generator: torch.Generator, dtype: torch.dtype, gradient: bool) -> None:
    logits, labels, weights = inputs(generator, 1003, dtype)
    weights[[0, 3]] = 0.0
    labels[0] = -100
    clean = run(logits, labels, weights)
    logits[[0, 3]] = torch.nan
    nll, rank, out = run(logits, labels, weights, gradient=gradient)
    assert torch.equal(nll, clean[0])
    assert torch.equal(rank, clean[1])
    assert nll[[0, 3]].tolist() == [0.0, 0.0]
    assert rank[[0, 3]].tolist() == [0, 0]
    if gradient:
        assert torch.equal(out, clean[2])
        assert not out[[0, 3]].any()
        check(logits, labels, weights)
    else:
        assert torch.equal(out.nan_to_num(7.0), logits.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_wider_stride_leaves_the_margin_alone(generator: torch.Generator, dtype: torch.dtype) -> None:
    logits, labels, weights = inputs(generator, 1003, dtype)
    weights[2] = 0.0
    storage = torch.full((ROWS, 1011), 77.0, dtype=dtype, device=DEVICE)
    storage[:, :1003] = logits.to(DEVICE)
    nll, rank = torch.empty(ROWS, device=DEVICE), torch.empty(ROWS, dtype=torch.int64, device=DEVICE)
    cross_entropy_(storage[:, :1003], labels.to(DEVICE), weights.to(DEVICE), nll, rank)
    plain = run(logits, labels, weights)
    assert torch.equal(nll.cpu(), plain[0])
    assert torch.equal(rank.cpu(), plain[1])
    assert torch.equal(storage[:, :1003].cpu(), plain[2])
    assert bool((storage[:, 1003:] == 77.0).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits(generator: torch.Generator, dtype: torch.dtype) -> None:
    """±1e4: the label alone at the top, far below it, all equal, all but one at the bottom."""
    logits, labels, weights = inputs(generator, 1003, dtype)
    logits[:2] = -1e4
    logits[0, labels[0]] = 1e4
    logits[1, (labels[1] + 1) % 1003] = 1e4
    logits[2:4] = torch.tensor([[1e4], [-1e4]]).to(dtype)
    logits[4] += 1e4
    check(logits, labels, weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_confident_row_keeps_its_small_loss(generator: torch.Generator, dtype: torch.dtype) -> None:
    """The label ahead by 12 at a height of 100: the rounding of the peak must cancel, else a loss of 1e-3 drowns."""
    logits = torch.zeros(ROWS, 1003)
    labels = torch.randint(1003, (ROWS,), generator=generator)
    height = torch.linspace(90.0, 110.0, ROWS)[:, None]
    logits = (logits + height - 12.0).scatter(1, labels[:, None], height).to(dtype)
    nll, _, gradient = run(logits, labels, torch.ones(ROWS))
    want_nll, _, want_gradient = reference(logits, labels, torch.ones(ROWS))
    torch.testing.assert_close(nll.double(), want_nll, rtol=1e-3, atol=0.0)
    own = labels[:, None]
    torch.testing.assert_close(gradient.double().gather(1, own), want_gradient.gather(1, own), rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_wrong_is_nan(generator: torch.Generator, dtype: torch.dtype) -> None:
    """Labels outside of the vocabulary, a NaN logit, an infinite one, a NaN weight; the other row is not touched."""
    logits, labels, weights = inputs(generator, 1003, dtype)
    good = run(logits, labels, weights)
    labels[0], labels[1] = 1003, -1
    logits[2, 500], logits[3, 500], weights[4] = torch.nan, torch.inf, torch.nan
    nll, rank, gradient = run(logits, labels, weights)
    assert bool(nll[:4].isnan().all())
    assert bool(gradient[:5].isnan().any(1).all())
    assert torch.equal(nll[5], good[0][5])
    assert torch.equal(rank[5], good[1][5])
    assert torch.equal(gradient[5], good[2][5])


def test_without_gradient_the_logits_stay(generator: torch.Generator) -> None:
    logits, labels, weights = inputs(generator, 1003, torch.float32)
    nll, rank, out = run(logits, labels, weights, gradient=False)
    with_gradient = run(logits, labels, weights)
    assert torch.equal(out, logits)
    assert torch.equal(nll, with_gradient[0])
    assert torch.equal(rank, with_gradient[1])


def test_refuses_what_does_not_fit(generator: torch.Generator) -> None:
    logits, labels, weights = (tensor.to(DEVICE) for tensor in inputs(generator, 64, torch.float32))
    nll, rank = torch.empty(ROWS, device=DEVICE), torch.empty(ROWS, dtype=torch.int64, device=DEVICE)
    for wrong in (
        (logits.T, labels, weights, nll, rank),
        (logits.double(), labels, weights, nll, rank),
        (logits, labels.int(), weights, nll, rank),
        (logits, labels, weights.double(), nll, rank),
        (logits, labels, weights, nll[1:], rank),
        (logits, labels, weights, nll, rank.repeat(2)[::2]),
    ):
        with pytest.raises(ValueError, match="must be"):
            cross_entropy_(*wrong)
