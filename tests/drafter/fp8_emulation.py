"""Without a GPU: kernels are interpreted, and `torch._scaled_mm` is what it means, a float32 product of what the fp8
values stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


def emulated_product(
    left: Tensor,
    right: Tensor,
    *,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    out: Tensor,
) -> Tensor:
    assert left.stride(1) == 1
    assert right.stride(0) == 1
    assert not any(size % 16 for size in (left.shape[1], right.stride(1), *right.shape))
    assert scale_a.shape == (left.shape[0], 1)
    assert scale_b.shape == (1, right.shape[1])
    assert scale_a.dtype == scale_b.dtype == torch.float32
    return out.copy_(((left.float() @ right.float()) * scale_a * scale_b).to(out_dtype))


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.6 loses the carry where rounding to fp8 fills the mantissa: 127 becomes 64."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if target != tl.float8e4nv or source != tl.float32:
            return convert(values, source, target, mode)
        return torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(torch, "_scaled_mm", emulated_product)
