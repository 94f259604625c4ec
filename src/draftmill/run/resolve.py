"""From the user's wishes, the target's config and the prepared set to a complete drafter, before a weight is loaded."""

from __future__ import annotations

from typing import Any, Protocol

from draftmill.data.prepared import PreparedSet
from draftmill.data.tokenizer import tokenizer_fingerprint
from draftmill.drafter.blocks import default_gamma
from draftmill.drafter.config import DrafterConfig, DrafterSpec, default_taps, layer_kinds
from draftmill.errors import UserError
from draftmill.target.shape import TargetShape


class TokenCounts(Protocol):
    """The part of a prepared set needed here."""

    def occurs(self, token_id: int) -> int: ...


def resolve_spec(config: DrafterConfig, shape: TargetShape, mask_token_id: int) -> DrafterSpec:
    """Sizes left out follow the target. Raises UserError for what cannot be."""
    types, causal = layer_kinds(config)
    heads = config.num_attention_heads or shape.num_attention_heads
    kv_heads = config.num_key_value_heads or shape.num_key_value_heads
    if heads % kv_heads:
        raise UserError(
            f"drafter: {heads} query heads cannot share {kv_heads} key/value heads; make them divide evenly"
        )
    head_dim = config.head_dim or shape.head_dim
    if head_dim % 2:
        raise UserError(f"drafter.head_dim: {head_dim} is odd; the rotary embedding needs pairs")
    theta = config.rope_theta or shape.rope_theta
    if theta is None:
        raise UserError("the target has no rotary embedding to take the base from; set drafter.rope_theta, e.g. 10000")
    return DrafterSpec(
        hidden_size=shape.hidden_size,
        intermediate_size=config.intermediate_size or shape.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps or shape.rms_norm_eps,
        rope_theta=theta,
        block_size=config.block_size,
        mask_token_id=mask_token_id,
        taps=_taps(config, shape),
        layer_types=types,
        layer_causal=causal,
        sliding_window=config.sliding_window,
        vocab_size=shape.vocab_size,
        num_target_layers=shape.layers,
        max_position_embeddings=shape.max_position_embeddings,
    )


def check_tokenizer(prepared: PreparedSet, tokenizer: Any, model: str) -> None:
    """The data must have been prepared with this target's tokenizer and template; other ids mean other words."""
    if tokenizer_fingerprint(tokenizer) != prepared.info.tokenizer_fingerprint:
        raise UserError(
            f"{prepared.folder} was prepared with the tokenizer of {prepared.info.model}, which differs from that of "
            f"target.model {model}; the drafter would learn other prompts than it is served. Prepare the data again "
            f"with --model {model}"
        )


def resolve_gamma(gamma: float | None, block_size: int) -> float:
    return default_gamma(block_size) if gamma is None else gamma


def _taps(config: DrafterConfig, shape: TargetShape) -> tuple[int, ...]:
    if config.taps is None:
        return default_taps(shape.layers, max(2, config.layers))
    if config.taps[0] < 0 or config.taps[-1] >= shape.layers:
        raise UserError(f"drafter.taps: {config.taps}, but the target's layers are 0 … {shape.layers - 1}")
    return tuple(config.taps)


def resolve_mask_token(wanted: int | None, tokenizer: Any, vocab_size: int, counts: TokenCounts) -> tuple[int, str]:
    """(mask token id, where it comes from). Never a token that real text or the data holds.

    Without a wish: the first row of the embedding that no tokenizer entry uses. Where there is none the user has to
    name an idle special token; the error lists those the data never holds.
    """
    if wanted is None:
        used = max(tokenizer.get_vocab().values()) + 1
        if used < vocab_size and counts.occurs(used) == 0:
            return (
                used,
                f"unused embedding row: the tokenizer has {used} entries, the embedding {vocab_size} rows",
            )
        raise UserError(
            "drafter.mask_token_id: the target's embedding has no unused row, so a token must be named that no text "
            f"produces. {_candidates(tokenizer, vocab_size, counts)}"
        )
    _refuse_real_token(wanted, tokenizer, vocab_size, counts)
    return wanted, f"set by drafter.mask_token_id; {tokenizer.convert_ids_to_tokens(wanted)!r} never occurs in the data"


def _refuse_real_token(wanted: int, tokenizer: Any, vocab_size: int, counts: TokenCounts) -> None:
    roles = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id, "bos": tokenizer.bos_token_id}
    role = next((name for name, token in roles.items() if token == wanted), None)
    problem = None
    if wanted >= vocab_size:
        problem = f"is outside the target's embedding of {vocab_size} rows"
    elif role is not None:
        problem = f"is the tokenizer's {role} token, which real text holds"
    elif counts.occurs(wanted):
        problem = (
            f"occurs {counts.occurs(wanted)} times in the prepared data, so the drafter would mistake text for a gap"
        )
    if problem:
        raise UserError(f"drafter.mask_token_id: {wanted} {problem}. {_candidates(tokenizer, vocab_size, counts)}")


def _candidates(tokenizer: Any, vocab_size: int, counts: TokenCounts) -> str:
    roles = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}
    special = sorted(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    idle = [i for i in special if i < vocab_size and i not in roles and counts.occurs(i) == 0]
    if not idle:
        return "This tokenizer has no idle special token either; add one and resize the target's embedding"
    listed = ", ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)}" for i in idle[:5])
    return f"Special tokens that the data never holds: {listed}; for example drafter.mask_token_id={idle[0]}"
