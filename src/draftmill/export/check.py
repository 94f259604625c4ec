"""Is the exported drafter the trained one? Read back from the files alone, by this package and by z-lab's client.

Legend: n context tokens, B block size, K taps, H hidden size.
"""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftmill.drafter import attention
from draftmill.drafter.blocks import Blocks
from draftmill.drafter.model import Drafter
from draftmill.errors import UserError
from draftmill.export.layout import from_config
from draftmill.export.zlab import CONFIG, cast_tensors, load_zlab, read_config

REFEREE = "dflash"  # z-lab's client on PyPI
REFEREE_TOLERANCE = 1e-3  # relative to the largest output, in float32


@dataclass(frozen=True, slots=True)
class ExportCheck:
    """tensors: compared, all equal. context_tokens: length of the random context, longer than any window. output_gap:
    largest difference of the reloaded drafter's hidden states from those of the trained weights cast to the
    checkpoint's dtype. referee_gap: the same for z-lab's client, relative to the largest output; None where it is not
    installed."""

    tensors: int
    context_tokens: int
    output_gap: float
    referee_gap: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def check_export(folder: Path, drafter: Drafter, *, seed: int = 0) -> ExportCheck:
    """Compare an export with the drafter in memory. Raises UserError naming the first tensor or output that differs.

    Outputs are computed in float32 on the CPU from random features and block embeddings.
    """
    config = read_config(folder)
    spec, dtype = from_config(config, folder / CONFIG)
    if spec != drafter.spec:
        name = next(name for name, value in drafter.spec.to_dict().items() if getattr(spec, name) != value)
        raise _differs(folder, f"{name} is {getattr(spec, name)}, trained was {getattr(drafter.spec, name)}")
    reloaded = load_zlab(folder)
    written = reloaded.state_dict()
    trained = cast_tensors(drafter, dtype)
    for name, value in trained.items():
        if not torch.equal(written[name], value):
            raise _differs(folder, f"tensor {name} is not the trained one cast to {dtype}")
    features, embeddings = random_inputs(drafter, seed)
    exact = Drafter(spec)
    exact.load_state_dict(trained)
    ours = block_outputs(reloaded.float(), features, embeddings)
    gap = float((ours - block_outputs(exact, features, embeddings)).abs().max())
    if gap > 0:
        raise _differs(folder, f"hidden states are off by {gap:.3g}")
    return ExportCheck(len(trained), features.shape[0], gap, _referee_gap(folder, features, embeddings, ours))


def random_inputs(drafter: Drafter, seed: int) -> tuple[Tensor, Tensor]:
    """Features [n, K·H] and block embeddings [B, H], fp32, with n beyond the window."""
    spec = drafter.spec
    tokens = (spec.sliding_window or 0) + 2 * spec.block_size
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(tokens, len(spec.taps) * spec.hidden_size, generator=generator)
    return features, torch.randn(spec.block_size, spec.hidden_size, generator=generator)


def block_outputs(drafter: Drafter, features: Tensor, embeddings: Tensor) -> Tensor:
    """Hidden states [B, H] of one block behind the whole context, by the training path."""
    spec, tokens = drafter.spec, features.shape[0]
    places = torch.arange(tokens)
    positions = tokens + torch.arange(spec.block_size)
    zero = torch.zeros(1, dtype=torch.long)
    ids = torch.zeros(1, spec.block_size, dtype=torch.long)
    block = Blocks(zero + tokens, ids, positions[None], zero, ids, ids.float())
    attend = attention.dense(spec, block, torch.zeros_like(places), places)
    context = drafter.context_keys_values(drafter.context(features), places)
    hidden: Tensor = drafter(embeddings, positions, context, attend)
    return hidden


def referee_outputs(folder: Path, features: Tensor, embeddings: Tensor) -> Tensor:
    """The same hidden states from z-lab's client, float32."""
    from dflash import DFlashDraftModel

    model = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    positions = torch.arange(features.shape[0] + embeddings.shape[0])[None]
    out: Tensor = model(position_ids=positions, noise_embedding=embeddings[None], target_hidden=features[None])[0]
    return out


def _referee_gap(folder: Path, features: Tensor, embeddings: Tensor, ours: Tensor) -> float | None:
    if importlib.util.find_spec(REFEREE) is None:
        return None
    theirs = referee_outputs(folder, features, embeddings)
    gap = float((theirs - ours).abs().max() / theirs.abs().max())
    if not gap <= REFEREE_TOLERANCE:
        raise _differs(folder, f"z-lab's client computes hidden states that are off by {gap:.3g} of their size")
    return gap


def _differs(folder: Path, what: str) -> UserError:
    return UserError(f"{folder}: {what}; the exported drafter is not the trained one. Do not serve it; export it again")
