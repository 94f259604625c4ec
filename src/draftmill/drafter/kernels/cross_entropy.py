"""Cross-entropy over rows of logits that turns them, in place, into their gradient: one program per row, two passes.

The counterpart of `log_softmax`, `label_rank` and the logit gradient of `drafter/loss.py` in one launch. Bound by
memory: the logits are read twice and written once, or the gradient goes out in fp8, which is half the bytes.

In fp8 the label's entry stays apart (see drafter/fp8.py) and the others of a row have their own scale. No pass is
needed to find it: none of them is above the largest probability, nor above what the label leaves to all of them.

Legend: C rows of a chunk, V vocabulary. Exponents are kept in units of log 2: e^x = 2^(x·LOG2E).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftmill.drafter.fp8 import LogitGradient
from draftmill.drafter.kernels.quantise import E4M3

BLOCK = 4096  # columns per step of a program
NUM_WARPS = 8
LOAD_BYTES = 16  # the widest load of a thread
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_BELOW_ZERO = tl.constexpr(-0x7FFFFFFF)  # the bits of the negative fp32 nearest to zero
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # a start for maxima; −inf − (−inf) would be NaN
_FP8_TOP = tl.constexpr(256.0)  # where the scale puts its bound in fp8; with its rounding error still below 448
_LEAST_REST = tl.constexpr(1.52587890625e-05)  # 2^-16; a smaller 1 − p is mostly rounding error of p


@triton.jit  # type: ignore[untyped-decorator]
def _offsets(GROUPS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Columns of one step, [GROUPS, LANES]: a group is what one thread loads at once."""
    return tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _load(row, columns, V: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    return tl.load(row + columns, mask=columns < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _below(x):  # type: ignore[no-untyped-def]
    """The largest fp32 less than x (finite or +inf): to be above it is to be at least x."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x > 0, bits - 1, tl.where(x < 0, bits + 1, _BELOW_ZERO))
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _statistics(row, label, own, V: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """First pass: peak = max x·LOG2E, mass = Σ 2^(x·LOG2E − peak), and the rank of the label, whose logit is `own`.

    State is kept per group: its columns belong to one thread (where the row stride is a multiple of 16), so no step
    needs a reduction across threads, and the sum is rescaled once per group. The peak is rounded before it is used, so
    its rounding cancels in mass and gradient. Counting in fp32 (exact to 2^24) costs fewer instructions than in int32.
    """
    block: tl.constexpr = GROUPS * LANES
    offsets = _offsets(GROUPS, LANES)
    peak = tl.full([GROUPS], _LOWEST, tl.float32)
    mass = tl.zeros([GROUPS], tl.float32)
    above = tl.zeros([GROUPS], tl.float32)
    below = _below(own)
    for start in range(0, V, block):
        x = _load(row, start + offsets, V)
        higher = tl.maximum(peak, tl.max(x, 1) * _LOG2E)
        mass = mass * tl.exp2(peak - higher) + tl.sum(tl.exp2(tl.fma(x, _LOG2E, -higher[:, None])), 1)
        peak = higher
        bar = tl.where(start + block <= label, below, own)  # every tie here has a lower id than the label
        above += tl.sum((x > bar).to(tl.float32), 1)
    columns = label // block * block + offsets
    tied = (_load(row, columns, V) == own) & (columns < label)  # in the label's own step
    rank = tl.sum(above.to(tl.int32) + tl.sum(tied.to(tl.int32), 1), 0)
    highest = tl.max(peak, 0)
    return highest, tl.sum(mass * tl.exp2(peak - highest), 0), rank


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    row,
    out,
    label,
    scale,
    weight,
    peak,
    V: tl.constexpr,  # noqa: N803
    APART: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
):
    """Second pass: 2^(x·LOG2E − peak)·scale into `out`, which may be the row itself; the label's less the weight, or 0.

    Backwards: what was read last is still in the cache.
    """
    block: tl.constexpr = GROUPS * LANES
    steps: tl.constexpr = (V + block - 1) // block
    for step in range(0, steps):
        columns = (steps - 1 - step) * block + _offsets(GROUPS, LANES)
        x = tl.exp2(tl.fma(_load(row, columns, V), _LOG2E, -peak)) * scale
        x = tl.where(columns == label, 0.0 if APART else x - weight, x)
        tl.store(out + columns, x.to(out.dtype.element_ty), mask=columns < V)


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits,
    labels,
    weights,
    nll,
    rank,
    others,
    others_scales,
    own_gradient,
    stride,
    others_stride,
    V: tl.constexpr,  # noqa: N803
    GRADIENT: tl.constexpr,  # noqa: N803
    APART: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
):
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * stride  # a chunk can hold more than 2^31 logits
    out = others + number.to(tl.int64) * others_stride if APART else row
    weight = tl.load(weights + number)
    if weight == 0:
        tl.store(nll + number, 0.0)
        tl.store(rank + number, 0)
        if GRADIENT:
            zeros = tl.zeros([GROUPS, LANES], tl.float32).to(out.dtype.element_ty)
            for start in range(0, V, GROUPS * LANES):
                columns = start + _offsets(GROUPS, LANES)
                tl.store(out + columns, zeros, mask=columns < V)
            if APART:
                tl.store(others_scales + number, 0.0)
                tl.store(own_gradient + number, 0.0)
    else:
        label = tl.load(labels + number)
        valid = (label >= 0) & (label < V)
        label = tl.where(valid, label, 0).to(tl.int32)
        own = tl.load(row + label).to(tl.float32)
        peak, mass, above = _statistics(row, label, own, V, GROUPS, LANES)
        mass = tl.where(valid, mass, float("nan"))  # a label outside of the vocabulary must not pass unseen
        tl.store(nll + number, tl.log(mass) - tl.fma(own, _LOG2E, -peak) * _LN2)
        tl.store(rank + number, above)
        if GRADIENT:
            if APART:
                rest = 1 - tl.exp2(tl.fma(own, _LOG2E, -peak)) / mass
                bound = tl.minimum(1 / mass, tl.maximum(rest, _LEAST_REST))
                tl.store(others_scales + number, weight * bound / _FP8_TOP)
                tl.store(own_gradient + number, -weight * rest)
                scale = _FP8_TOP / (bound * mass)
            else:
                scale = weight / mass
            _gradient(row, out, label, scale, weight, peak, V, APART, GROUPS, LANES)


def cross_entropy_(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    nll: Tensor,
    rank: Tensor,
    gradient: bool = True,
    apart: LogitGradient | None = None,
) -> None:
    """Write each row's −log softmax(logits)[label] and label rank; turn the logits into w·(softmax − onehot).

    logits [C, V] bf16 or fp32, rows contiguous, any row stride; labels [C] int64; weights [C] fp32. Outputs, all
    contiguous: nll [C] fp32, not weighted; rank [C] int64, by the rule of `loss.label_rank`. Sums are fp32. With
    `gradient` off the logits are left as they are. `apart`: takes the gradient instead of the logits, in fp8; entries
    below 2^-18 of the largest but the label's are rounded to 0.

    A row of weight 0 gets nll 0, rank 0 and zeros for a gradient; neither its logits nor its label is read. A label
    outside of [0, V) makes nll and gradient of its row NaN. ValueError for tensors that do not fit together.
    """
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1 or logits.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"logits must be bf16 or fp32 with contiguous rows, got {logits.dtype}, {logits.stride()}")
    for name, tensor, dtype in (
        ("labels", labels, torch.int64),
        ("weights", weights, torch.float32),
        ("nll", nll, torch.float32),
        ("rank", rank, torch.int64),
    ):
        if tensor.shape != (rows,) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, {dtype} [{rows}], got {tensor.dtype} {list(tensor.shape)}")
    lanes = LOAD_BYTES // logits.element_size()
    others, others_scales, own_gradient = (None, None, None) if apart is None else _parts(apart, logits)
    _cross_entropy[(rows,)](
        logits, labels, weights, nll, rank, others, others_scales, own_gradient, logits.stride(0),
        0 if others is None else others.stride(0), vocabulary, gradient, apart is not None, BLOCK // lanes, lanes,
        num_warps=NUM_WARPS,
    )  # fmt: skip


def _parts(apart: LogitGradient, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (values, scales), own = apart
    if values.shape != logits.shape or values.dtype != E4M3 or values.stride(1) != 1:
        raise ValueError(f"others must be {E4M3} {list(logits.shape)}, got {values.dtype} {list(values.shape)}")
    for name, tensor in (("scales", scales), ("own", own)):
        if tensor.shape != logits.shape[:1] or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, fp32 [{len(logits)}], got {tensor.dtype} {list(tensor.shape)}"
            )
    return values, scales, own
