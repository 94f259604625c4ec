"""z-lab's own client loads what is exported, computes the same, and accepts the same tokens.

Needs the PyPI package `dflash`; skipped without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_zlab import MIXED, make
from torch import nn

from draftmill.drafter.config import FULL, SLIDING
from draftmill.drafter.model import Drafter, initialise
from draftmill.evaluate.decode import decode
from draftmill.export.check import block_outputs, check_export, random_inputs, referee_outputs
from draftmill.export.zlab import export_zlab

pytest.importorskip("dflash.model")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_causal": (True, True)},
        MIXED,
        {"layer_types": (SLIDING, FULL), "layer_causal": (False, False), "sliding_window": 3},
        {"layer_types": (SLIDING, SLIDING), "layer_causal": (True, True), "sliding_window": 3},
    ],
    ids=["full", "full causal", "4 sliding + 1 full", "window narrower than a block", "all sliding"],
)
def test_case_38_same_hidden_states(tmp_path: Path, changes: dict[str, Any]) -> None:
    drafter = make(**changes)
    folder = export_zlab(drafter, tmp_path / "d", dtype=torch.float32)
    features, embeddings = random_inputs(drafter, 1)
    with torch.no_grad():
        ours, theirs = block_outputs(drafter, features, embeddings), referee_outputs(folder, features, embeddings)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    report = check_export(folder, drafter)
    assert report.referee_gap is not None
    assert report.referee_gap < 1e-5


def test_case_38_referee_would_notice_a_wrong_window(tmp_path: Path) -> None:
    folder = export_zlab(make(**MIXED), tmp_path / "d", dtype=torch.float32)
    wider = make(**(MIXED | {"sliding_window": 7}))
    features, embeddings = random_inputs(wider, 1)
    with torch.no_grad():
        gap = (referee_outputs(folder, features, embeddings) - block_outputs(wider, features, embeddings)).abs().max()
    assert gap > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixed", [pytest.param(False, id="full", marks=pytest.mark.long), pytest.param(True, id="sliding + full")]
)
def test_case_37_same_acceptance_on_a_real_target(smollm2: Path, tmp_path: Path, mixed: bool) -> None:
    """Block by block the same number of accepted tokens, with a prompt longer than the window."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = "Write one sentence about the sea and one about the mountains."
    chat = [{"role": "user", "content": text}]
    ids = torch.tensor(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    drafter = learnt_by_heart(target, ids, mixed)
    folder = export_zlab(drafter, tmp_path / "d", dtype=torch.float32)
    ours = decode(target, drafter, ids, max_new_tokens=40, stop_ids={2})
    theirs = referee_decode(folder, target, ids, 40)
    assert list(ours.tokens) == theirs.output_ids[0, len(ids) :].tolist()
    # At the end of the answer the client shortens the drafter's block, which changes what a bidirectional drafter sees.
    whole = [block for block in ours.blocks if block.start + drafter.spec.block_size <= len(ids) + 40]
    assert [block.produced for block in whole] == theirs.acceptance_lengths[: len(whole)]
    assert max(block.accepted for block in whole) > 1


def referee_decode(folder: Path, target: nn.Module, ids: torch.Tensor, new_tokens: int) -> Any:
    """The client times with CUDA events; on a CPU its clock is replaced. Nothing else is changed."""
    import time

    import dflash.model as client

    model = client.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_cuda_time", time.perf_counter)
        return client.dflash_generate(model, target, ids[None], new_tokens, [2], return_stats=True)


def learnt_by_heart(target: nn.Module, ids: torch.Tensor, mixed: bool) -> Drafter:
    """A small drafter trained for a moment on the target's own answer to this prompt."""
    from draftmill.drafter import attention
    from draftmill.drafter.blocks import make_blocks
    from draftmill.drafter.objective import block_loss
    from draftmill.evaluate.agreement import plain_features
    from draftmill.evaluate.plain import plain
    from draftmill.target.model import shared_matrices

    drafter = make(
        hidden_size=576, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=32, block_size=8,
        mask_token_id=17, taps=(1, 14, 27), vocab_size=49152, num_target_layers=30,
        layer_types=(SLIDING, FULL) if mixed else (FULL, FULL), layer_causal=(mixed, False),
        sliding_window=12 if mixed else None,
    ).train()  # fmt: skip
    initialise(drafter, 0)
    embedding, head = shared_matrices(target)
    answer = plain(target, ids, max_new_tokens=40, stop_ids={2}).tokens
    whole = torch.cat((ids, ids.new_tensor(answer)))
    with torch.no_grad():
        features = plain_features(target, whole, drafter.spec.taps)
    places, documents = torch.arange(len(whole)), torch.zeros(len(whole), dtype=torch.long)
    anchors = torch.arange(len(ids), len(whole) - 1, 2)
    blocks = make_blocks(
        whole, places >= len(ids), places, documents, anchors, block_size=8, mask_token_id=17, gamma=4.0
    )
    attend = attention.dense(drafter.spec, blocks, documents, places)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    for _ in range(80):
        loss, _ = block_loss(
            drafter, features, places, blocks, embedding=embedding, head=head, attend=attend, chunk_rows=256
        )
        (loss / blocks.weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval().requires_grad_(False)
