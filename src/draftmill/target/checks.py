"""Captured states are checked before anyone trains on them."""

from __future__ import annotations

import torch
from torch import Tensor

from draftmill.records import TokenBatch


class StateCheck:
    """The check of one batch. Made on the device, without waiting for it; `verify` waits and judges."""

    def __init__(self, features: Tensor, batch: TokenBatch, taps: tuple[int, ...]) -> None:
        """features [T, K·H]."""
        self._batch, self._taps, self._end = batch, taps, batch.tokens
        self._peaks = features[: self._end].view(self._end, len(taps), -1).abs().amax(-1)  # (tokens, K); NaN wins

    def verify(self) -> None:
        """Raise ArithmeticError when a real token's state is NaN, infinite or all zero at some tap.

        The message names the document (its number in the prepared set), the token and the layer.
        """
        bad = ~torch.isfinite(self._peaks) | (self._peaks == 0)
        if not bool(bad.any()):
            return
        # The lowest layer first: what is broken there spreads to every later one, also to tokens that were sound.
        batch = self._batch
        tap = int(bad.any(0).nonzero()[0])
        token = int(bad[:, tap].nonzero()[0])
        document = int(batch.document_ids[token])
        zero = float(self._peaks[token, tap]) == 0
        what = "zero in every component" if zero else "not finite (NaN or infinite)"
        raise ArithmeticError(
            f"hidden state of target layer {self._taps[tap]} is {what}: batch {batch.index}, document "
            f"{batch.documents[document]} of the prepared set, token {int(batch.position_ids[token])} of it"
            f" ({int(bad.any(-1).sum())} of {self._end} tokens are affected); the batch is refused"
        )
