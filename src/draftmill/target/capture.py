"""Running the target for its hidden states.

Legend: T tokens of a batch, K taps, H hidden size, V rows of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftmill.errors import UserError
from draftmill.records import TokenBatch
from draftmill.target import isolation
from draftmill.target.checks import StateCheck
from draftmill.target.config import TargetConfig
from draftmill.target.model import fingerprint, load_causal_lm, shared_matrices

FINAL = -1  # key of the post-norm last hidden state among the destinations


class Target:
    """The frozen target. For hidden states it runs up to the last tap, and never its head.

    embedding, head: [V, H] in the target's dtype (one matrix where the target ties them). isolation: "packed" or
    "rows". fingerprint: of the weights, dtype included.
    """

    def __init__(self, config: TargetConfig, taps: tuple[int, ...], *, device: str = "cpu") -> None:
        isolation.register()
        self.taps = taps
        self.device = device
        self.isolation = "rows"
        self._model = load_causal_lm(config, device=device)
        self.fingerprint = fingerprint(self._model)
        self.embedding, self.head = shared_matrices(self._model)
        self.hidden_size = int(self.embedding.shape[1])
        self._backbone: Any = self._model.get_decoder()  # type: ignore[operator]
        if not hasattr(self._backbone, "layers") or not hasattr(self._backbone, "norm"):
            raise UserError(
                f"target.model: {type(self._backbone).__name__} keeps its layers under other names than `layers` and "
                "`norm`, so its hidden states cannot be tapped; this architecture is not supported"
            )
        self._layers, self._norm = self._backbone.layers, self._backbone.norm
        self._own_attention: str = self._backbone.config._attn_implementation
        self._check_taps()
        self._write: Callable[[int, Tensor], None] | None = None
        for tap, layer in enumerate(taps):
            self._layers[layer].register_forward_hook(self._hook(tap))
        self._norm.register_forward_hook(self._hook(FINAL))
        self._shorten()
        if config.isolation != "rows":
            self._try_packed(required=config.isolation == "packed")

    @property
    def features_width(self) -> int:
        return len(self.taps) * self.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @torch.no_grad()
    def capture(self, batch: TokenBatch, features: Tensor) -> None:
        """Run the batch and write the taps' outputs into features [T, K·H]; the padding becomes zero.

        Raises ArithmeticError naming document and layer when a state is not finite or all zero.
        """
        self.begin(batch, features).verify()

    @torch.no_grad()
    def begin(self, batch: TokenBatch, features: Tensor) -> StateCheck:
        """As `capture`, but give the work to the device and return; the states are to be verified before their use."""
        features[batch.tokens :].zero_()
        self._run(batch.input_ids, batch.spans(), self._columns(features))
        return StateCheck(features, batch, self.taps)

    @torch.no_grad()
    def capture_final(self, batch: TokenBatch, final_hidden: Tensor) -> None:
        """Write the post-norm last hidden states into final_hidden [T, H], by running the whole depth.

        head · final_hidden[t] are the target's own logits for the token at t + 1.
        """
        final_hidden[batch.tokens :].zero_()
        with self._full_depth():
            self._run(batch.input_ids, batch.spans(), {FINAL: final_hidden})

    @torch.no_grad()
    def features(self, input_ids: Tensor) -> Tensor:
        """[n, K·H] of one document, input_ids [n]: the very path that training takes."""
        features = torch.empty(len(input_ids), self.features_width, dtype=self.dtype, device=self.device)
        self._run(input_ids, [(0, len(input_ids))], self._columns(features))
        return features

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """The complete causal language model, head included, for decoding. `features` works in here too."""
        before = self.isolation
        self._set_isolation("rows")
        try:
            with self._full_depth():
                yield self._model
        finally:
            self._set_isolation(before)

    @contextmanager
    def _full_depth(self) -> Iterator[None]:
        self._backbone.layers, self._backbone.norm = self._layers, self._norm
        self._backbone.config.num_hidden_layers = len(self._layers)
        try:
            yield
        finally:
            self._shorten()

    def _shorten(self) -> None:
        """Leave out what lies behind the last tap: nothing there is needed for the taps."""
        self._backbone.layers = self._layers[: self.taps[-1] + 1]
        self._backbone.config.num_hidden_layers = self.taps[-1] + 1
        self._backbone.norm = nn.Identity()

    def _check_taps(self) -> None:
        if self.taps[-1] >= len(self._layers) or self.taps[0] < 0:
            raise UserError(f"drafter.taps: {list(self.taps)}, but the target's layers are 0 … {len(self._layers) - 1}")

    def _set_isolation(self, isolation_: str) -> None:
        attention = isolation.NAME if isolation_ == "packed" else self._own_attention
        self._model.set_attn_implementation(attention)  # type: ignore[operator]
        self.isolation = isolation_

    @torch.no_grad()
    def _try_packed(self, *, required: bool) -> None:
        """Packed is used only where two documents in one row give what each gives alone by the model's own attention.

        That finds what leaks (recurrent states, convolutions) and what this attention would leave out (learnt sinks,
        soft caps), whatever the architecture is called.
        """
        ids = torch.arange(24, dtype=torch.int32) * 7919 % int(self.embedding.shape[0])
        spans = [(0, 10), (10, 24)]
        alone = torch.cat([self.features(ids[start:end]) for start, end in spans])
        together = torch.empty_like(alone)
        try:
            self._set_isolation("packed")
            self._run(ids, spans, self._columns(together))
            same = _equal_to_rounding(together, alone)
        except (TypeError, ValueError):  # the architecture takes no attention but its own
            same = False
        if same:
            return
        self._set_isolation("rows")
        if required:
            raise UserError(
                "target.isolation: packed, but in this architecture packed documents do not give the states that each "
                "gives alone (it carries state from token to token, or its attention has parts of its own); the "
                "drafter would learn from states it never meets. Use auto or rows"
            )

    def _columns(self, features: Tensor) -> dict[int, Tensor]:
        """Destination [T, H] of each tap: views of features [T, K·H], so nothing is concatenated."""
        return dict(enumerate(torch.split(features, self.hidden_size, dim=1)))

    def _run(self, input_ids: Tensor, spans: isolation.Spans, into: dict[int, Tensor]) -> None:
        """Run the documents at `spans` of input_ids and write the states of their tokens."""
        ids = input_ids.to(self.device).long()
        if self.isolation == "packed":
            self._run_packed(ids[: spans[-1][1]], spans, into)
            return
        for group in isolation.row_groups(spans, spans[-1][1]):
            self._run_rows(ids, [spans[document] for document in group], into)

    def _run_packed(self, ids: Tensor, spans: isolation.Spans, into: dict[int, Tensor]) -> None:
        places = torch.cat([torch.arange(end - start, device=ids.device) for start, end in spans])

        def write(tap: int, states: Tensor) -> None:
            into[tap][: len(ids)].copy_(states[0])

        with isolation.documents(spans), self._writing(write, into):
            self._backbone(input_ids=ids[None], position_ids=places[None], use_cache=False)

    def _run_rows(self, ids: Tensor, spans: isolation.Spans, into: dict[int, Tensor]) -> None:
        rows = ids.new_zeros((len(spans), max(end - start for start, end in spans)))
        for row, (start, end) in enumerate(spans):
            rows[row, : end - start] = ids[start:end]

        def write(tap: int, states: Tensor) -> None:
            for row, (start, end) in enumerate(spans):
                into[tap][start:end].copy_(states[row, : end - start])

        with self._writing(write, into):
            self._backbone(input_ids=rows, use_cache=False)

    @contextmanager
    def _writing(self, write: Callable[[int, Tensor], None], into: dict[int, Tensor]) -> Iterator[None]:
        self._write = lambda tap, states: write(tap, states) if tap in into else None
        try:
            yield
        finally:
            self._write = None

    def _hook(self, tap: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if self._write is not None:  # None: the model is being used as a whole
                self._write(tap, output[0] if isinstance(output, tuple) else output)

        return hook


def _equal_to_rounding(one: Tensor, two: Tensor) -> bool:
    """Whether two [n, W] agree within 16 units in the last place of each column's largest value."""
    scale = two.float().abs().amax(0).clamp_min(1e-6)
    return bool(((one.float() - two.float()).abs() / scale).amax() <= 16 * torch.finfo(one.dtype).eps)
