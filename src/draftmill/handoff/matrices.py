"""The target's embedding and head on their way to the drafters: once per run, in memory that all processes share.

So a drafter needs no weights of the target but these two, and has exactly those that the target itself uses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftmill.handoff.shared import SharedMemory


class SharedMatrices:
    """Room for embedding and head, both [V, H]. Pages never written (the head of a tied target) cost nothing."""

    def __init__(self, rows: int, hidden_size: int, dtype: torch.dtype) -> None:
        self.rows, self.hidden_size, self.dtype = rows, hidden_size, dtype
        self._memory = SharedMemory("matrices", 2 * self._bytes, reserve=False)

    @property
    def _bytes(self) -> int:
        return self.rows * self.hidden_size * self.dtype.itemsize

    def write(self, embedding: Tensor, head: Tensor) -> None:
        assert embedding.shape == head.shape == (self.rows, self.hidden_size), "not the sizes of the target's config"
        self._view(0).copy_(embedding)
        if not is_tied(embedding, head):
            self._view(1).copy_(head)

    def read(self, *, tied: bool, device: str) -> tuple[Tensor, Tensor]:
        """(embedding, head) on `device`; on the CPU the shared memory itself."""
        embedding = self._view(0).to(device)
        return embedding, embedding if tied else self._view(1).to(device)

    def _view(self, which: int) -> Tensor:
        return self._memory.tensor(which * self._bytes, (self.rows, self.hidden_size), self.dtype)


def is_tied(embedding: Tensor, head: Tensor) -> bool:
    return embedding.data_ptr() == head.data_ptr()
