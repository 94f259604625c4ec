"""A short real decode at the end of a run: training accuracy means nothing if decoding does not accept the drafts."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftmill.data.prepared import PreparedSet
from draftmill.drafter.model import Drafter
from draftmill.evaluate.agreement import Agreement, NothingDrafted, agreement
from draftmill.evaluate.measure import stop_ids
from draftmill.target.capture import Target

NEW_TOKENS = 48
LONGEST_PROMPT = 1024


def decode_check(
    target: Target, drafter: Drafter, prepared: PreparedSet, tokenizer: Any, prompts: int
) -> Agreement | None:
    """Decode prompts of the prepared set and compare with the training path. None when no answer drafts a block."""
    served = copy.deepcopy(drafter).to(target.dtype).eval()
    with target.whole() as model:
        try:
            return agreement(
                model,
                served,
                [ids.to(target.device) for ids in some_prompts(prepared, prompts)],
                NEW_TOKENS,
                stop_ids=stop_ids(model, tokenizer),
                features=target.features,
            )
        except NothingDrafted:  # every answer ends at once
            return None


def some_prompts(prepared: PreparedSet, count: int) -> list[Tensor]:
    """Evenly spaced documents up to their first trained token: [n] int64 each."""
    prompts = []
    for number in np.linspace(0, len(prepared) - 1, num=min(count, len(prepared)), dtype=np.int64).tolist():
        ids, mask = prepared.document(number)
        first = int(np.flatnonzero(mask)[0])
        if 0 < first <= LONGEST_PROMPT:
            prompts.append(torch.from_numpy(ids[:first].astype(np.int64)))
    return prompts


def describe(result: Agreement | None) -> str:
    """The line for the console; a disagreement says what it means and where to look."""
    if result is None:
        return "decode check: the target's answers to these prompts are too short to draft a block; nothing to compare"
    text = (
        f"decode check: τ {result.tau_decoded:.2f} decoded, {result.tau_training:.2f} by the training path on the same "
        f"{result.blocks} blocks; {result.blocks_agree:.0%} of blocks agree"
    )
    if result.flagged:
        text += (
            "\nwarning: decoding and training disagree, so this drafter will be accepted less than its training "
            f"metrics say; first at prompt {result.first.prompt}, position {result.first.start}"
            if result.first
            else "\nwarning: decoding and training draft different tokens; served acceptance will differ"
        )
    return text
