"""Loading the target and running it for its hidden states.

Legend: T tokens of a batch, K taps, H hidden size, V rows of the embedding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftmill.errors import UserError
from draftmill.records import TokenBatch
from draftmill.target import isolation
from draftmill.target.checks import check_states
from draftmill.target.config import TargetConfig

Writer = Callable[[int, Tensor], object]


def load_causal_lm(config: TargetConfig, *, device: str, attention: str = "sdpa") -> nn.Module:
    """The whole model, head included, in evaluation mode without gradients."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        config.model,
        dtype=getattr(torch, config.dtype),
        attn_implementation=attention,
        trust_remote_code=config.trust_remote_code,
    )
    return model.to(device).eval().requires_grad_(False)


class Target:
    """The text backbone, run up to the last tap; the head is never run for hidden states.

    embedding, head: [V, H] in the target's dtype (one matrix where the target ties them). isolation: "packed" or
    "rows". fingerprint: of the weights, dtype included.
    """

    def __init__(self, config: TargetConfig, taps: tuple[int, ...], *, device: str = "cpu") -> None:
        isolation.register()
        self.taps = taps
        self.device = device
        self.isolation = "packed" if config.isolation != "rows" else "rows"
        self._model = self._load(config, device)
        self.fingerprint = fingerprint(self._model)
        self.embedding, self.head = shared_matrices(self._model)
        self.hidden_size = int(self.embedding.shape[1])
        self._backbone: Any = self._model.get_decoder()  # type: ignore[operator]
        self._layers, self._norm = self._backbone.layers, self._backbone.norm
        self._check_taps()
        self._write: Writer | None = None
        for number, layer in enumerate(taps):
            self._layers[layer].register_forward_hook(self._tap(number))
        self._shorten()
        if config.isolation != "rows":
            self._settle_isolation(config.isolation)

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
        self._run(batch.input_ids, batch.spans(), features)
        check_states(features, batch, self.taps)

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """The complete causal language model, head included, for decoding. `features` works in here too."""
        attention = self._backbone.config._attn_implementation
        self._backbone.layers, self._backbone.norm = self._layers, self._norm
        self._backbone.config.num_hidden_layers = len(self._layers)
        self._model.set_attn_implementation("sdpa")  # type: ignore[operator]
        try:
            yield self._model
        finally:
            self._model.set_attn_implementation(attention)  # type: ignore[operator]
            self._shorten()

    @torch.no_grad()
    def features(self, input_ids: Tensor) -> Tensor:
        """[n, K·H] of one document, input_ids [n]: the very path that training takes."""
        features = torch.empty(len(input_ids), self.features_width, dtype=self.dtype, device=self.device)
        self._run(input_ids, [(0, len(input_ids))], features)
        return features

    def _check_taps(self) -> None:
        if self.taps[-1] >= len(self._layers) or self.taps[0] < 0:
            raise UserError(f"drafter.taps: {list(self.taps)}, but the target's layers are 0 … {len(self._layers) - 1}")

    def _shorten(self) -> None:
        """Leave out what lies behind the last tap: nothing there is needed for hidden states."""
        self._backbone.layers = self._layers[: self.taps[-1] + 1]
        self._backbone.config.num_hidden_layers = self.taps[-1] + 1
        self._backbone.norm = nn.Identity()

    def _load(self, config: TargetConfig, device: str) -> nn.Module:
        if self.isolation == "rows":
            return load_causal_lm(config, device=device)
        try:
            return load_causal_lm(config, device=device, attention=isolation.NAME)
        except ValueError:
            if config.isolation == "packed":
                raise
            self.isolation = "rows"
            return load_causal_lm(config, device=device)

    def _settle_isolation(self, wanted: str) -> None:
        """Packed is used only where two documents in one row give what each gives alone."""
        if self.isolation == "packed" and self._leaks():
            if wanted == "packed":
                raise UserError(
                    "target.isolation: packed, but packed documents of this architecture see each other (it carries "
                    "state from token to token); the drafter would learn from states it never meets. Use auto or rows"
                )
            self.isolation = "rows"
            self._model.set_attn_implementation("sdpa")  # type: ignore[operator]

    @torch.no_grad()
    def _leaks(self) -> bool:
        ids = torch.arange(24, dtype=torch.int32) * 7919 % int(self.embedding.shape[0])
        spans = [(0, 10), (10, 24)]
        together, alone = (torch.empty(24, self.features_width, dtype=self.dtype, device=self.device) for _ in "ab")
        try:
            self._run(ids, spans, together)
        except (TypeError, ValueError):  # the architecture asks its attention for what this one cannot do
            return True
        for start, end in spans:
            self._run(ids[start:end], [(0, end - start)], alone[start:end])
        scale = alone.float().abs().amax(0).clamp_min(1e-6)
        rounding = 16 * torch.finfo(self.dtype).eps
        return bool(((together.float() - alone.float()).abs() / scale).amax() > rounding)

    def _run(self, input_ids: Tensor, spans: isolation.Spans, features: Tensor) -> None:
        end = spans[-1][1]
        ids = input_ids.to(self.device).long()
        features[end:].zero_()
        if self.isolation == "packed":
            places = torch.cat([torch.arange(e - s, device=ids.device) for s, e in spans])
            with isolation.documents(spans):
                self._forward(ids[None, :end], lambda k, x: self._column(features, k)[:end].copy_(x[0]), places[None])
            return
        for group in isolation.row_groups(spans, max(end, 1)):
            self._run_rows(ids, [spans[d] for d in group], features)

    def _run_rows(self, ids: Tensor, spans: isolation.Spans, features: Tensor) -> None:
        longest = max(end - start for start, end in spans)
        rows = ids.new_zeros((len(spans), longest))
        for row, (start, end) in enumerate(spans):
            rows[row, : end - start] = ids[start:end]

        def write(tap: int, states: Tensor) -> None:
            for row, (start, end) in enumerate(spans):
                self._column(features, tap)[start:end].copy_(states[row, : end - start])

        self._forward(rows, write, None)

    def _forward(self, ids: Tensor, write: Writer, position_ids: Tensor | None) -> None:
        self._write = write
        try:
            extra = {} if position_ids is None else {"position_ids": position_ids}
            self._backbone(input_ids=ids, use_cache=False, **extra)
        finally:
            self._write = None

    def _column(self, features: Tensor, tap: int) -> Tensor:
        return features[:, tap * self.hidden_size : (tap + 1) * self.hidden_size]

    def _tap(self, number: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if self._write is not None:  # None: the model is being used as a whole
                self._write(number, output[0] if isinstance(output, tuple) else output)

        return hook


def shared_matrices(model: nn.Module) -> tuple[Tensor, Tensor]:
    """(embedding [V, H], head [V, H]) of a causal language model, as they are used at inference.

    A head with a bias cannot be exported: drafters are served with the plain matrix.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if getattr(head, "bias", None) is not None:
        raise UserError("the target's lm_head has a bias, which no serving engine applies to a drafter; not supported")
    return embedding.weight.detach(), head.weight.detach()


def fingerprint(model: nn.Module) -> str:
    """16 hex digits over config, dtype and 64 evenly spaced values of each weight: names the target in checkpoints."""
    config: Any = model.config
    plain = {k: v for k, v in config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.flatten()
        places = torch.arange(64, device=flat.device) * (flat.numel() - 1) // 63
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(flat[places].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
