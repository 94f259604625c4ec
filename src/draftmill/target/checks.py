"""Captured states are checked before anyone trains on them."""

from __future__ import annotations

import torch
from torch import Tensor

from draftmill.records import TokenBatch


def check_states(features: Tensor, batch: TokenBatch, taps: tuple[int, ...]) -> None:
    """Raise ArithmeticError when a real token's state is NaN, infinite or all zero at some tap.

    features [T, K·H]. The message names the document (its number in the prepared set), the token and the layer.
    """
    end = batch.tokens
    peaks = features[:end].view(end, len(taps), -1).abs().amax(-1)  # (tokens, K); NaN wins in amax
    bad = ~torch.isfinite(peaks) | (peaks == 0)
    if not bool(bad.any()):
        return
    # The lowest layer first: what is broken there spreads to every later one, also to tokens that were sound.
    tap = int(bad.any(0).nonzero()[0])
    token = int(bad[:, tap].nonzero()[0])
    document = int(batch.document_ids[token])
    what = "zero in every component" if float(peaks[token, tap]) == 0 else "not finite (NaN or infinite)"
    raise ArithmeticError(
        f"hidden state of target layer {taps[tap]} is {what}: batch {batch.index}, document "
        f"{batch.documents[document]} of the prepared set, token {int(batch.position_ids[token])} of it"
        f" ({int(bad.any(-1).sum())} of {end} tokens are affected); the batch is refused"
    )
