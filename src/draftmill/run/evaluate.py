"""`draftmill evaluate` and `draftmill export`: from a run folder to numbers and to a checkpoint others load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftmill.data.tokenizer import load_tokenizer
from draftmill.drafter.model import Drafter
from draftmill.errors import UserError
from draftmill.evaluate.config import EvaluateConfig
from draftmill.evaluate.measure import Progress, Result, evaluate
from draftmill.evaluate.plots import report_png
from draftmill.export.check import ExportCheck, check_export
from draftmill.export.zlab import export_zlab
from draftmill.run.files import RunFolder, write_atomically
from draftmill.target.config import TargetConfig
from draftmill.target.model import fingerprint, load_causal_lm
from draftmill.train.checkpoint import Checkpoint, load_drafter, open_checkpoint


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation gave and where it was written; the files are None outside a run folder."""

    result: Result
    json_path: Path | None
    png_path: Path | None


def evaluate_run(
    path: Path,
    config: EvaluateConfig,
    *,
    target: str | None,
    template_kwargs: dict[str, Any] | None,
    device: str,
    progress: Progress | None,
) -> Evaluated:
    """Evaluate the newest checkpoint of a run folder, or a checkpoint folder.

    target: other folder of the target's weights; left out, the one trained with. template_kwargs: left out, those of
    the training data. Weights that are not those trained with are refused.
    """
    checkpoint = open_checkpoint(path)
    state = checkpoint.state
    drafter = load_drafter(checkpoint)
    model = _load_target(checkpoint, target, device)
    tokenizer = load_tokenizer(target or state["target"])
    kwargs = state["template_kwargs"] if template_kwargs is None else template_kwargs
    result = evaluate(
        model, tokenizer, drafter, config, kwargs, recorded_template_kwargs=state["template_kwargs"], progress=progress
    )
    folder = RunFolder(path)
    if not folder.status.exists():
        return Evaluated(result, None, None)
    values = {"step": checkpoint.step, "prompts_file": str(config.prompts), **result.to_dict()}
    write_atomically(folder.evaluation, json.dumps(values, indent=1))
    report_png([row for row in folder.read_metrics() if row["loss"] is not None], values, folder.report)
    return Evaluated(result, folder.evaluation, folder.report)


def export_run(path: Path, output: Path, *, dtype: str, overwrite: bool) -> tuple[Path, Drafter]:
    """Write the newest checkpoint of a run in the z-lab layout. Returns the folder and the drafter it was made of."""
    checkpoint = open_checkpoint(path)
    drafter = load_drafter(checkpoint)
    keys = ("target", "target_fingerprint", "template_kwargs", "data_fingerprint", "step")
    extra = {key: checkpoint.state[key] for key in keys}
    if Path(extra["target"]).is_dir():  # a checkpoint that is published should not tell where files lie at home
        extra["target"] = Path(extra["target"]).name
    return export_zlab(drafter, output, dtype=getattr(torch, dtype), extra=extra, overwrite=overwrite), drafter


def check_run_export(path: Path, output: Path) -> ExportCheck:
    """Reload an export and compare it with the run it was made of."""
    return check_export(output, load_drafter(open_checkpoint(path)))


def _load_target(checkpoint: Checkpoint, target: str | None, device: str) -> torch.nn.Module:
    state = checkpoint.state
    config = TargetConfig(model=target or state["target"], dtype=state["target_dtype"])  # type: ignore[call-arg]
    model = load_causal_lm(config, device=device)
    if fingerprint(model) != state["target_fingerprint"]:
        raise UserError(
            f"{config.model} is not the target this drafter was trained with (fingerprint {fingerprint(model)}, "
            f"trained with {state['target_fingerprint']}); acceptance would be that of another model. "
            "Give its folder with --target"
        )
    return model
