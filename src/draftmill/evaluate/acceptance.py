"""Acceptance from decoded blocks.

Legend: slots are numbered 1 … B−1; slot k of the block at position p holds the proposal for position p + k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftmill.evaluate.decode import Block


@dataclass(frozen=True, slots=True)
class Acceptance:
    """blocks: number of blocks. tau: mean over blocks of produced tokens per target forward pass, a mean of per-block
    numbers: accepted runs of (3, 1) and (2, 0) tokens are 1.5 drafted, not 1.25. `None` where there was no block.
    slots: P(slot k accepted | the slots before it accepted), over the blocks that drafted slot k. slots_unconditional:
    P(slot k accepted) over the same blocks. Both lists run over slots 1 … B−1; None = never drafted or never reached.
    """

    blocks: int
    tau: float | None
    slots: tuple[float | None, ...]
    slots_unconditional: tuple[float | None, ...]


def acceptance(blocks: Sequence[Block], slots: int) -> Acceptance:
    """Over all blocks of one or more answers. slots: B−1."""
    conditional, unconditional = [], []
    for slot in range(1, slots + 1):
        drafted = [block for block in blocks if block.drafted >= slot]
        reached = [block for block in drafted if block.accepted >= slot - 1]
        hits = sum(block.accepted >= slot for block in drafted)
        conditional.append(hits / len(reached) if reached else None)
        unconditional.append(hits / len(drafted) if drafted else None)
    tau = sum(block.produced for block in blocks) / len(blocks) if blocks else None
    return Acceptance(len(blocks), tau, tuple(conditional), tuple(unconditional))
