"""The drafter's matrices as a fused step uses them: low-precision copies to multiply, fp32 gradients that grow.

Matrices that multiply the same rows lie side by side in one piece, so that one product serves them: q, k and v; gate
and up. The fp32 masters keep their names and shapes; their `.grad` are views of the pieces here.

Legend: O outputs, I inputs, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftmill.drafter.fp8 import RowScaled, empty, multiply, quantised
from draftmill.drafter.kernels.quantise import add_magnitudes, round_both, scales_of
from draftmill.drafter.model import Drafter, Layer


@dataclass(frozen=True, slots=True)
class Weight:
    """value [O, I] in the compute dtype, gradient [O, I] fp32."""

    value: Tensor
    gradient: Tensor

    def outputs(self, start: int) -> Weight:
        """The part from output `start` on."""
        return Weight(self.value[start:], self.gradient[start:])

    def product(self, rows: Tensor) -> Tensor:
        """rows [R, I] → [R, O]."""
        return rows @ self.value.T

    def input_gradient(self, grad: Tensor) -> Tensor:
        """Gradient of the outputs [R, O] → of the rows [R, I]."""
        return grad @ self.value

    def add_input_gradient(self, grad: Tensor, into: Tensor) -> None:
        """into [R, I] += `input_gradient`."""
        into.addmm_(grad, self.value)

    def add_gradient(self, grad: Tensor, rows: Tensor) -> None:
        """gradient += gradᵀ · rows, accumulated in fp32: [R, O], [R, I]."""
        add_product(self.gradient, grad.T, rows)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """As `Weight`, but product and input gradient are those of numbers rounded to e4m3, rows and gradients too.

    by_output [O, I], by_input [I, O]: a product sums over one axis, and its scales must not change along that. Rows and
    gradients are rounded as they come, each row by a scale of its own; e4m3 for both, since with these scales the range
    is wide enough. Takes as much memory as in bf16.
    """

    by_output: RowScaled
    by_input: RowScaled
    gradient: Tensor

    def outputs(self, start: int) -> Fp8Weight:
        """The part from output `start` on."""
        by_output = RowScaled(self.by_output.values[start:], self.by_output.scales[start:])
        by_input = RowScaled(self.by_input.values[:, start:], self.by_input.scales)
        return Fp8Weight(by_output, by_input, self.gradient[start:])

    def product(self, rows: Tensor) -> Tensor:
        """rows [R, I] → [R, O]."""
        out = rows.new_empty(rows.shape[0], self.gradient.shape[0])
        multiply(quantised(rows), self.by_output, fast=True, out=out)
        return out

    def input_gradient(self, grad: Tensor) -> Tensor:
        """Gradient of the outputs [R, O] → of the rows [R, I]. Summed in fp32: entries of a gradient differ widely."""
        out = grad.new_empty(grad.shape[0], self.gradient.shape[1])
        multiply(quantised(grad), self.by_input, fast=False, out=out)
        return out

    def add_input_gradient(self, grad: Tensor, into: Tensor) -> None:
        """into [R, I] += `input_gradient`."""
        into.add_(self.input_gradient(grad))

    def add_gradient(self, grad: Tensor, rows: Tensor) -> None:
        """gradient += gradᵀ · rows, in the dtype of both, accumulated in fp32: [R, O], [R, I]."""
        add_product(self.gradient, grad.T, rows)

    def round(self, masters: list[Tensor]) -> None:
        """Take over the values of the masters, stacked by outputs."""
        sizes = [master.shape[0] for master in masters]
        rows, columns = (torch.zeros_like(part.scales, dtype=torch.int32) for part in (self.by_output, self.by_input))
        for master, own in zip(masters, rows.split(sizes), strict=True):
            add_magnitudes(master, own, columns)
        self.by_output.scales.copy_(scales_of(rows))
        self.by_input.scales.copy_(scales_of(columns))
        values, scales = self.by_output.values.split(sizes), self.by_output.scales.split(sizes)
        turned = self.by_input.values.split(sizes, dim=1)
        for master, value, scale, column in zip(masters, values, scales, turned, strict=True):
            round_both(master, value, column, scale, self.by_input.scales)


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left · right, into fp32. On a GPU in one product: nothing of lower precision is written in between."""
    if left.dtype == torch.float32:
        into.addmm_(left, right)
    elif into.is_cuda:
        torch.addmm(into, left, right, out_dtype=torch.float32, out=into)
    else:
        into.add_(left.float() @ right.float())


AnyWeight = Weight | Fp8Weight


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """qkv [(Hq + 2·Hkv)·D, H], out [H, Hq·D], gate_up [2F, H], down [H, F]. The norms are parameters of `layer`."""

    qkv: AnyWeight
    out: AnyWeight
    gate_up: AnyWeight
    down: AnyWeight
    layer: Layer


class ComputeWeights:
    """All matrices of a drafter for a step in `dtype`, or with fp8 products. Takes over the parameters' gradients."""

    def __init__(self, drafter: Drafter, dtype: torch.dtype, *, fp8: bool = False) -> None:
        self._copies: list[Tensor] = []
        self._masters: list[Tensor] = []
        self._rounded: list[tuple[Fp8Weight, list[Tensor]]] = []
        self._gradients: list[Tensor] = []
        self._dtype, self._fp8 = dtype, fp8
        self.fc = self._piece(drafter.fc)
        self.layers = [self._layer(layer) for layer in drafter.layers if isinstance(layer, Layer)]
        for parameter in drafter.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self._gradients.append(parameter.grad)
        self.refresh()

    def refresh(self) -> None:
        """The masters have changed."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._masters)
        for weight, masters in self._rounded:
            weight.round(masters)

    def clear_gradients(self) -> None:
        torch._foreach_zero_(self._gradients)

    def keep_gradients(self) -> list[Tensor]:
        """A copy of what has been collected so far, for `restore_gradients`."""
        return [gradient.clone() for gradient in self._gradients]

    def restore_gradients(self, kept: list[Tensor]) -> None:
        torch._foreach_copy_(self._gradients, kept)

    def _layer(self, layer: Layer) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        return LayerWeights(
            self._piece(attention.q_proj, attention.k_proj, attention.v_proj),
            self._piece(attention.o_proj),
            self._piece(mlp.gate_proj, mlp.up_proj),
            self._piece(mlp.down_proj),
            layer,
        )

    def _piece(self, *linears: nn.Linear) -> AnyWeight:
        """One piece for matrices of the same inputs, stacked by outputs."""
        masters = [linear.weight.detach() for linear in linears]
        sizes = [master.shape[0] for master in masters]
        gradient = masters[0].new_zeros(sum(sizes), masters[0].shape[1])
        for linear, own in zip(linears, gradient.split(sizes), strict=True):
            linear.weight.grad = own
        self._gradients.append(gradient)
        if self._fp8:
            weight = Fp8Weight(empty(gradient, *gradient.shape), empty(gradient, *gradient.T.shape), gradient)
            self._rounded.append((weight, masters))
            return weight
        value = torch.empty_like(gradient, dtype=self._dtype)
        self._copies += value.split(sizes)
        self._masters += masters
        return Weight(value, gradient)
