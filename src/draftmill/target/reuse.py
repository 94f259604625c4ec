"""Hidden states kept in memory across epochs: a bin holds the same tokens in every epoch, so its states stay right."""

from __future__ import annotations

from torch import Tensor


class ReusedStates:
    """Bounded by bytes; what no longer fits is computed anew each time. Nothing is evicted."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._kept: dict[int, Tensor] = {}

    def load(self, bin: int, features: Tensor) -> bool:
        """Copy the bin's states into features [T, K·H] (zero behind them). False when they are not kept."""
        kept = self._kept.get(bin)
        if kept is None:
            return False
        features[: len(kept)].copy_(kept)
        features[len(kept) :].zero_()
        return True

    def keep(self, bin: int, features: Tensor) -> None:
        """Remember the states of a bin's real tokens: features [tokens, K·H]."""
        size = features.numel() * features.element_size()
        if self.bytes + size <= self.limit_bytes:
            self._kept[bin] = features.clone()
            self.bytes += size
