"""The README.md beside an exported drafter."""

from __future__ import annotations

from typing import Any

import torch

from draftmill.drafter.config import DrafterSpec

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, dflash, draftmill]
---
# DFlash drafter{for_target}

A block-diffusion drafter for speculative decoding (DFlash, [arXiv 2602.06036](https://arxiv.org/abs/2602.06036)),
trained with draftmill. It proposes up to {drafted} tokens per forward pass of its target; the target's output stays
its own. It is not a language model by itself: embedding and output head are the target's and are not in this folder.

| | |
|---|---|
| layers | {layers} ({types}) |
| block size | {block} (one known token, {drafted} drafted) |
| tapped target layers (0-based) | {taps} of {target_layers} |
| mask token id | {mask} |
| precision | {dtype} |

## Use
With z-lab's client (`pip install "dflash[local]"`):

```python
import torch
from dflash import DFlashDraftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{target}", dtype=torch.{dtype}).eval()
tokenizer = AutoTokenizer.from_pretrained("{target}")
drafter = DFlashDraftModel.from_pretrained("path/to/this/folder", dtype=torch.{dtype})
prompt = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "How many primes are below 100?"}}],
    add_generation_prompt=True, return_tensors="pt", return_dict=False{template},
)
tokens = drafter.spec_generate(target, prompt, 256, [tokenizer.eos_token_id])
```

With vLLM: `vllm serve {target} --speculative-config '{{"method": "dflash", "model": "path/to/this/folder",
"num_speculative_tokens": {drafted}}}'`. With SGLang: `--speculative-algorithm DFLASH
--speculative-draft-model-path path/to/this/folder`. Render prompts with the same chat template and arguments as in
training.
"""


def model_card(spec: DrafterSpec, dtype: torch.dtype, extra: dict[str, Any]) -> str:
    """Text of the card. extra may name the `target` and the `template_kwargs` of its chat template."""
    target = extra.get("target")
    kwargs = extra.get("template_kwargs") or {}
    kinds = {kind: spec.layer_types.count(kind) for kind in dict.fromkeys(spec.layer_types)}
    window = f", window {spec.sliding_window}" if spec.sliding_window is not None else ""
    return CARD.format(
        for_target=f" for {target}" if target else "",
        target=target or "path/to/the/target",
        layers=spec.layers,
        types=" + ".join(f"{count} × {kind}" for kind, count in kinds.items()) + window,
        block=spec.block_size,
        drafted=spec.block_size - 1,
        taps=", ".join(map(str, spec.taps)),
        target_layers=spec.num_target_layers,
        mask=spec.mask_token_id,
        dtype=str(dtype).removeprefix("torch."),
        template="".join(f", {key}={value!r}" for key, value in kwargs.items()),
    )
