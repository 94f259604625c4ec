"""Loading the target: the causal language model, its shared matrices, its fingerprint."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

from draftmill.errors import UserError
from draftmill.target.config import TargetConfig


def load_causal_lm(config: TargetConfig, *, device: str) -> nn.Module:
    """The whole model, head included, in evaluation mode without gradients, with the attention it prefers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        config.model,
        dtype=getattr(torch, config.dtype),
        trust_remote_code=config.trust_remote_code,
    )
    return model.to(device).eval().requires_grad_(False)


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
