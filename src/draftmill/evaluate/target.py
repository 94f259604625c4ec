"""The target in decoding: forward passes over a cache that can be rolled back, and the outputs of the tapped layers.

Legend: n tokens of one forward pass, K taps, H hidden size, V vocabulary. Batch size is 1 throughout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from draftmill.errors import UserError


def rounding(dtype: torch.dtype) -> float:
    """Share of the largest logit by which two forward passes of different width may differ: a few units in the last
    place of the logits in half precision, accumulated rounding of the layers in float32."""
    return max(4 * torch.finfo(dtype).eps, 1e-4)


class Taps:
    """While entered, collects what the tapped decoder layers of `model` put out. `take` gives the last forward's."""

    def __init__(self, model: nn.Module, taps: tuple[int, ...]) -> None:
        self._layers = model.get_decoder().layers  # type: ignore[operator]
        if taps and not 0 <= min(taps) <= max(taps) < len(self._layers):
            raise UserError(
                f"the drafter taps target layers {list(taps)} but this target has layers 0 … {len(self._layers) - 1}; "
                "they do not belong together. Give the target that the drafter was trained with"
            )
        self._taps = taps
        self._outputs: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._handles = [self._layers[layer].register_forward_hook(self._hook(layer)) for layer in self._taps]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def take(self) -> Tensor:
        """[n, K·H]: the taps of the last forward pass side by side, in tap order."""
        return torch.cat([self._outputs.pop(layer)[0] for layer in self._taps], dim=-1)

    def _hook(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self._outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook


class CachedTarget:
    """A causal language model over one sequence, with a cache that `keep` rolls back.

    Attention layers are cropped. Layers with a recurrent state (gated delta nets, convolutions) cannot be: after a
    crop the library leaves the recurrent state where it was. With such a target the state of every layer is put back
    to what it was before the block and the kept tokens run once more.
    """

    def __init__(self, model: nn.Module, taps: tuple[int, ...] = ()) -> None:
        self._model = model
        self._taps = Taps(model, taps)
        self._has_taps = bool(taps)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._cache = DynamicCache(config=model.config)
        self.replays = not all(_croppable(layer) for layer in self._cache.layers)
        if not self.replays:
            self._cache.activate_past_recording()  # sliding layers keep what a rollback needs
        self._saved: list[dict[str, Any]] = []
        self._block = torch.empty(0, dtype=torch.long)

    def __enter__(self) -> Self:
        self._taps.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._taps.__exit__()

    def prefill(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """[n] int64 → logits after the last token [V], features [n, K·H] (None without taps)."""
        logits = self._forward(input_ids, logits_to_keep=1)
        if not self.replays:
            self._cache.crop(0)  # trims sliding layers to their window
        return logits[-1], self._take()

    def block(self, input_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """[n] int64 behind what is kept → logits [n, V], features [n, K·H]. Then call `keep`."""
        if self.replays:
            self._saved = [_state(layer) for layer in self._cache.layers]
        self._block = input_ids
        return self._forward(input_ids, logits_to_keep=0), self._take()

    def keep(self, count: int) -> None:
        """Keep the first `count` ≥ 1 tokens of the last block and forget the rest."""
        if not self.replays:
            self._cache.crop(count - len(self._block))
        elif count < len(self._block):
            for layer, state in zip(self._cache.layers, self._saved, strict=True):
                vars(layer).clear()
                vars(layer).update(state)
            self._forward(self._block[:count], logits_to_keep=1)
        self._saved = []

    def _forward(self, input_ids: Tensor, *, logits_to_keep: int) -> Tensor:
        """Without an attention mask: one sequence has no padding, and its positions follow from the cache."""
        cache = {self._cache_name: self._cache}
        output = self._model(input_ids=input_ids[None], use_cache=True, logits_to_keep=logits_to_keep, **cache)
        logits: Tensor = output.logits[0]
        return logits

    def _take(self) -> Tensor | None:
        return self._taps.take() if self._has_taps else None


def _croppable(layer: Any) -> bool:
    if type(layer).__name__ == "DummyLayer":  # holds nothing; by name, since older libraries lack it
        return True
    attention_only = isinstance(layer, DynamicLayer) and not hasattr(layer, "recurrent_states")
    return attention_only and bool(getattr(layer, "is_croppable", True))


def _state(layer: Any) -> dict[str, Any]:
    """What a cache layer holds. Attention layers replace their tensors at an update, so a reference is enough."""
    return dict(vars(layer)) if _croppable(layer) else {name: _copy(value) for name, value in vars(layer).items()}


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value.clone() if isinstance(value, Tensor) else value
