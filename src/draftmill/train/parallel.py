"""How several ranks train one drafter: gradients summed once per optimizer step, everything else as if they were one.

Sums, not means: gradients and Σ w are added over the ranks and divided once, so an update does not depend on how the
anchors fell over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from draftmill.drafter.metrics import Sums
from draftmill.drafter.model import Drafter

BUCKET_BYTES = 25 << 20  # small gradients travel together; a matrix of the 27B shape alone is larger than this


Doing = Callable[[str, str | None], None]  # is told what this process does now: an activity, and which piece of it


def nobody(_activity: str, _what: str | None) -> None:
    """Where nobody wants to know."""


class Parallel(Protocol):
    """rank of `ranks`. always_run: a rank without a valid anchor must run forward and backward like the others."""

    rank: int
    ranks: int
    always_run: bool

    def prepare(self, drafter: Drafter, *, by_autograd: bool) -> None:
        """Before the optimizer is made and before the first step. by_autograd: each micro-step is a single backward
        pass of autograd, at whose hooks a parameter's gradient is complete; if not, it is so at the end only."""

    def micro_step(self, *, last: bool) -> Any:
        """Context of a micro-step's forward and backward. Behind the last one of a step, .grad holds the sum of all."""

    def discard(self) -> None:
        """Forget what an unfinished step left beside .grad. All ranks call it behind the same micro-step."""

    def total(self, sums: Sums, tokens: Tensor) -> tuple[Sums, Tensor]:
        """Added over the ranks. tokens: 0-dim int64, on the device of the sums."""

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as a single rank would hold them. Every rank must call it; only the first may use what comes."""

    def part(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """What this rank keeps of a whole moment `value` of a parameter."""


class Alone:
    """One rank: nothing to share."""

    rank, ranks, always_run = 0, 1, False

    def prepare(self, drafter: Drafter, *, by_autograd: bool) -> None:
        pass

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        yield

    def discard(self) -> None:
        pass

    def total(self, sums: Sums, tokens: Tensor) -> tuple[Sums, Tensor]:
        return sums, tokens

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors

    def part(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        return value.to(parameter.device)


@dataclass
class _Bucket:
    """Parameters whose gradients travel together. missing: of those, not yet complete in this step."""

    parameters: list[nn.Parameter]
    missing: int = 0
    flat: Tensor | None = None
    work: Any = field(default=None)

    def launch(self) -> None:
        """Begin the sum over the ranks. What has no gradient here (no valid anchor on this rank) adds zero."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [given(p.grad) for p in self.parameters]
        self.flat = gradients[0] if len(gradients) == 1 else torch.cat([g.flatten() for g in gradients])
        self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self) -> None:
        """Wait (on a GPU: have the current stream wait) and put the sums where the gradients were."""
        assert self.flat is not None
        self.work.wait()
        if len(self.parameters) > 1:
            parts = self.flat.split([p.numel() for p in self.parameters])
            gradients = [given(p.grad) for p in self.parameters]
            shaped = [part.view_as(own) for part, own in zip(parts, gradients, strict=True)]
            torch._foreach_copy_(gradients, shaped)  # where they lie: a captured step knows them by address
        self.flat = self.work = None


class DataParallel:
    """Every rank holds the whole drafter. Gradients are reduced while the last micro-step's backward still runs, if
    autograd says when they are complete.

    All ranks begin the same sums in the same order, whatever their own backward does: a bucket goes when it and all
    before it are complete, and what is left goes when the backward is over.
    """

    always_run = False

    def __init__(self, bucket_bytes: int = BUCKET_BYTES, doing: Doing = nobody) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._doing = doing
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        self._launched = 0
        self._armed = False

    def prepare(self, drafter: Drafter, *, by_autograd: bool) -> None:
        size = self._bucket_bytes + 1
        for parameter in reversed(list(drafter.parameters())):  # about the order in which gradients become complete
            if size + parameter.nbytes > self._bucket_bytes:
                self._buckets.append(_Bucket([]))
                size = 0
            bucket = self._buckets[-1]
            bucket.parameters.append(parameter)
            size += parameter.nbytes
            if by_autograd:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        self._armed, self._launched = last, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        yield
        if last:
            self._doing("all-reduce", None)
            self._launch(all_of_them=True)
            for bucket in self._buckets:
                bucket.finish()
        self._armed = False

    def discard(self) -> None:
        pass  # no sum begins before the last micro-step, and that one ends all it began

    def total(self, sums: Sums, tokens: Tensor) -> tuple[Sums, Tensor]:
        self._doing("all-reduce", None)
        return total_over_ranks(sums, tokens)

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors

    def part(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        return value.to(parameter.device)

    def _hook(self, bucket: _Bucket) -> Any:
        def complete(_: Tensor) -> None:
            if self._armed:
                bucket.missing -= 1
                self._launch(all_of_them=False)

        return complete

    def _launch(self, *, all_of_them: bool) -> None:
        while self._launched < len(self._buckets) and (all_of_them or not self._buckets[self._launched].missing):
            self._buckets[self._launched].launch()
            self._launched += 1


class FullySharded:
    """Every rank holds a part of weights, gradients and moments; layers are put together when they are used (FSDP2)."""

    always_run = True

    def __init__(self, doing: Doing = nobody) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._doing = doing
        self._pending = False  # whether gradients wait for the last micro-step

    def prepare(self, drafter: Drafter, *, by_autograd: bool) -> None:
        assert by_autograd, "sharded weights need autograd to put them together"
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        device = next(drafter.parameters()).device.type
        mesh = init_device_mesh(device, (self.ranks,))
        self._drafter: Any = drafter
        self._modules: list[Any] = [*drafter.layers, drafter]
        for module in self._modules:
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        register_fsdp_forward_method(drafter, "train_forward")

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        self._drafter.set_requires_gradient_sync(last)
        self._pending = not last
        yield

    def discard(self) -> None:
        """Gradients that were not summed yet are those of whole weights, which only come back with these."""
        if self._pending:
            for module in self._modules:  # one after another: a device may not hold all at once
                module.unshard()
                module.zero_grad(set_to_none=True)
                module.reshard()
        self._pending = False

    def total(self, sums: Sums, tokens: Tensor) -> tuple[Sums, Tensor]:
        self._doing("all-reduce", None)
        return total_over_ranks(sums, tokens)

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """One after another, and kept in host memory by the first rank alone: a device may not hold all at once."""
        kept = {}
        for name, value in tensors.items():
            whole = as_whole(value)
            if self.rank == 0:
                kept[name] = whole.cpu()
        return kept

    def part(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        own = parameter.data
        if not isinstance(own, DTensor) or value.shape != parameter.shape:  # AdamW's step count is a plain number
            return value.to(parameter.device)
        return distribute_tensor(value.to(parameter.device), own.device_mesh, own.placements)


def given(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def is_shared_out(tensor: Tensor) -> bool:
    """Whether the ranks hold parts of it."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def as_whole(tensor: Tensor) -> Tensor:
    """A tensor of which the ranks hold parts, put together; any other as it is."""
    if not is_shared_out(tensor):
        return tensor
    whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return whole


def total_over_ranks(sums: Sums, tokens: Tensor) -> tuple[Sums, Tensor]:
    """One small reduction in fp64, which holds whole numbers up to 2^53 exactly."""
    slots, totals = sums.slots, sums.totals
    flat = torch.cat((slots.flatten(), totals, tokens.double()[None]))
    dist.all_reduce(flat)
    added = Sums(flat[: slots.numel()].view_as(slots), flat[slots.numel() : -1])
    return added, flat[-1].long()
