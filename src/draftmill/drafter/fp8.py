"""Products in fp8, on the tensor cores at twice the rate of bf16, and the frozen head made for them. CUDA only.

A product wants its scales constant along the summed axis. So the head is quantised twice: per token (row) for the
logits and per channel (column) for the gradient of the hidden states. Both copies are of the head less its mean row.
For the logits that is a shift of whole rows, which softmax and ranks do not see; so the mean, large in real heads,
costs no precision.

The gradient of a row of logits, w·(softmax − onehot), is one entry near −w, the label's, and V − 1 others, most of
them tiny. No fp8 format holds both well, so the label's stays in fp32 and meets the head's own row; the others are
scaled by their largest and rounded to e4m3. What they lose, entries below 2^-18 of the largest, is little mass, and
e4m3 rounds the entries that count half as coarsely as e5m2.

Legend: R rows, C rows of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftmill.drafter.kernels.quantise import E4M3, E4M3_MAX, SMALLEST_SCALE, round_rows

MULTIPLE = 16  # `_scaled_mm` wants the head's sizes in these
SLAB_ROWS = 4096  # of the head in fp32 at a time: 84 MB at H = 5120


class RowScaled(NamedTuple):
    """A matrix in fp8: values [R, K] e4m3, rows contiguous; scales [R] fp32. Row r is values[r] · scales[r]."""

    values: Tensor
    scales: Tensor


class LogitGradient(NamedTuple):
    """The gradient of a chunk's logits: others [C, V], 0 in the label's column of a row, and own [C] fp32 for that one.

    Own is minus the sum of the others.
    """

    others: RowScaled
    own: Tensor


def quantised(matrix: Tensor) -> RowScaled:
    """[R, K] bf16 or fp32 → the same in fp8, the largest entry of each row at the end of the range.

    A row with a NaN or an infinity becomes one that multiplies to NaN.
    """
    return RowScaled(*round_rows(matrix))


class Fp8Head:
    """The two products with a head, made for `fused_loss.fused_linear_cross_entropy`.

    Takes 2·V·H bytes, as much again as the head in bf16, to which it keeps a reference. Rounding to e4m3 moves a factor
    by 2.6 % (root mean square), so logits carry noise of 3 to 4 % of their spread. Most of what the gradient is off by,
    about 2 degrees, comes from that noise.
    """

    def __init__(self, head: Tensor) -> None:
        """head [V, H] bf16 on a CUDA device of compute capability ≥ 8.9. ValueError if V or H is no multiple of 16.

        Needs, beside the result, a few slabs of SLAB_ROWS × H in fp32 for a moment. The head must not change later.
        """
        vocabulary, hidden_size = head.shape
        if vocabulary % MULTIPLE or hidden_size % MULTIPLE:
            raise ValueError(f"an fp8 head must have sizes that are multiples of {MULTIPLE}, got {list(head.shape)}")
        self._head = head.detach()
        self._mean = head.new_zeros(hidden_size, dtype=torch.float)
        self._tokens = empty(head, vocabulary, hidden_size)
        self._channels = empty(head, hidden_size, vocabulary)
        self._quantise()

    def _quantise(self) -> None:
        head = self._head
        slabs = [slice(start, start + SLAB_ROWS) for start in range(0, head.shape[0], SLAB_ROWS)]
        for slab in slabs:
            self._mean += head[slab].sum(0, dtype=torch.float) / head.shape[0]
        largest = torch.zeros_like(self._mean)
        for slab in slabs:
            centred = head[slab] - self._mean
            largest = torch.maximum(largest, centred.abs().amax(0))
            self._tokens.scales[slab] = _scales(centred.abs().amax(1))
            self._tokens.values[slab] = (centred / self._tokens.scales[slab, None]).to(E4M3)
        self._channels.scales.copy_(_scales(largest))
        for slab in slabs:
            centred = head[slab] - self._mean
            self._channels.values[:, slab] = (centred / self._channels.scales).to(E4M3).T

    def logits(self, rows: Tensor, out: Tensor) -> None:
        """out [C, V] bf16 = rows [C, H] bf16 · headᵀ, up to a constant per row."""
        # H terms of like size: short registers will do.
        multiply(quantised(rows), self._tokens, fast=True, out=out)

    def gradient_buffer(self, rows: int) -> LogitGradient:
        """For `cross_entropy_` to write the gradient of a chunk's logits into: C·V bytes."""
        return LogitGradient(empty(self._head, rows, self._head.shape[0]), self._mean.new_empty(rows))

    def gradient(self, grad_logits: LogitGradient, labels: Tensor) -> Tensor:
        """Gradient of a chunk's logits, its labels [C] int64 → [C, H] bf16: grad_logits · head.

        Rows of zeros give exact zeros, whatever their label.
        """
        others = self._head.new_empty(labels.shape[0], self._head.shape[1])
        # V terms, few of them large: behind those a short register would lose the rest.
        multiply(grad_logits.others, self._channels, fast=False, out=others)
        own_rows = self._head[labels.clamp(0, self._head.shape[0] - 1)] - self._mean
        return torch.addcmul(others, own_rows, grad_logits.own[:, None]).to(others.dtype)


def _scales(largest: Tensor) -> Tensor:
    return (largest / E4M3_MAX).clamp_min(SMALLEST_SCALE)


def empty(like: Tensor, rows: int, columns: int) -> RowScaled:
    """Room for [rows, columns] on the device of `like`."""
    return RowScaled(like.new_empty(rows, columns, dtype=E4M3), like.new_empty(rows, dtype=torch.float))


def multiply(left: RowScaled, right: RowScaled, fast: bool, out: Tensor) -> None:
    """out [R, N] bf16 = left [R, K] · right [N, K]ᵀ. fast: sum in the tensor cores' own registers, of fewer bits than
    fp32."""
    torch._scaled_mm(
        left.values,
        right.values.T,
        scale_a=left.scales[:, None],
        scale_b=right.scales[None, :],
        out_dtype=out.dtype,
        use_fast_accum=fast,
        out=out,
    )
