"""The drafter's matrices as a fused step uses them: low-precision copies to multiply, fp32 gradients that grow.

Matrices that multiply the same rows lie side by side in one piece, so that one product serves them: q, k and v; gate
and up. The fp32 masters keep their names and shapes; their `.grad` are views of the pieces here.

Legend: O outputs, I inputs, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

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

    def add_gradient(self, grad: Tensor, rows: Tensor) -> None:
        """gradient += gradᵀ · rows, accumulated in fp32: [R, O], [R, I]."""
        add_product(self.gradient, grad.T, rows)


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left · right, into fp32. On a GPU in one product: nothing of lower precision is written in between."""
    if left.dtype == torch.float32:
        into.addmm_(left, right)
    elif into.is_cuda:
        torch.addmm(into, left, right, out_dtype=torch.float32, out=into)
    else:
        into.add_(left.float() @ right.float())


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """qkv [(Hq + 2·Hkv)·D, H], out [H, Hq·D], gate_up [2F, H], down [H, F]. The norms are parameters of `layer`."""

    qkv: Weight
    out: Weight
    gate_up: Weight
    down: Weight
    layer: Layer


class ComputeWeights:
    """All matrices of a drafter for a step in `dtype`. Takes over the parameters' gradients."""

    def __init__(self, drafter: Drafter, dtype: torch.dtype) -> None:
        self._copies: list[Tensor] = []
        self._masters: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._dtype = dtype
        self.fc = self._piece(drafter.fc)
        self.layers = [self._layer(layer) for layer in drafter.layers if isinstance(layer, Layer)]
        for parameter in drafter.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self._gradients.append(parameter.grad)
        self.refresh()

    def refresh(self) -> None:
        """The masters have changed."""
        torch._foreach_copy_(self._copies, self._masters)

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

    def _piece(self, *linears: nn.Linear) -> Weight:
        """One piece for matrices of the same inputs, stacked by outputs."""
        masters = [linear.weight for linear in linears]
        sizes = [master.shape[0] for master in masters]
        value = masters[0].new_empty(sum(sizes), masters[0].shape[1], dtype=self._dtype, requires_grad=False)
        gradient = torch.zeros_like(value, dtype=torch.float32)
        for master, copy, own in zip(masters, value.split(sizes), gradient.split(sizes), strict=True):
            master.grad = own
            self._copies.append(copy)
            self._masters.append(master.detach())
        self._gradients.append(gradient)
        return Weight(value, gradient)
