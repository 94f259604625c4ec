"""What `draftmill doctor` finds in a run's config: data, drafter, devices, run folder.

What `train` refuses is refused here too, because the functions of `train` are asked.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from draftmill.config import RunConfig
from draftmill.data.config import available_cpus
from draftmill.data.plan import BatchPlan
from draftmill.data.prepared import DROPPED_FILE, PreparedSet
from draftmill.data.tokenizer import load_tokenizer
from draftmill.drafter.config import DrafterSpec
from draftmill.drafter.memory import parameters
from draftmill.errors import UserError
from draftmill.run.build import Built, build, identity
from draftmill.run.doctor import Finding, not_writable
from draftmill.run.files import RunFolder
from draftmill.run.job import plain_because
from draftmill.run.placement import Placement, settle, threads_per_process
from draftmill.run.resolve import check_tokenizer, resolve_mask_token, resolve_spec
from draftmill.run.resume import changes, check_same_run
from draftmill.target.shape import load_config, read_shape
from draftmill.train.checkpoint import Checkpoint

CONFIG, DATA, DRAFTER, TARGET, RUN = "config", "data", "drafter", "target", "run folder"
REFUSED = "`draftmill train` refuses this"
LOST_SHARE = 0.05  # of rows or documents
PADDING_SHARE = 0.10
TRAINED_SHARE = 0.05
T = TypeVar("T")


@dataclass(slots=True)
class Parts:
    """What could be settled of a run. target: its transformers config. auto: `placement` stands for what `train` would
    measure and choose."""

    refusals: list[Finding] = field(default_factory=list)
    built: Built | None = None
    placement: Placement | None = None
    prepared: PreparedSet | None = None
    plan: BatchPlan | None = None
    spec: DrafterSpec | None = None
    target: Any = None
    auto: bool = False


def what_is_settled(config: RunConfig, parts: Parts) -> Iterator[Finding]:
    if parts.prepared is not None:
        yield from data(parts.prepared, parts.plan)
    if parts.built is not None:
        yield Finding(DATA, "tokenizer", "ok", "vocabulary and chat template are those of the target")
        yield from schedule(config, parts.built)
    yield from drafter(config, parts)


def attempt(refusals: list[Finding], group: str, name: str, call: Callable[[], T]) -> T | None:
    """What `call` returns. Where it raises a UserError: None, and an error with its text among the refusals."""
    try:
        return call()
    except UserError as error:
        refusals.append(Finding(group, name, "error", str(error), REFUSED))
        return None


# --- what the run is --------------------------------------------------------------------------------------------------


def settle_parts(config: RunConfig) -> Parts:
    """All that `train` settles before it loads a weight; where it refuses, every reason and not only the first."""
    named, auto = without_measuring(config)
    parts = Parts(auto=auto)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its warning about kernels is a finding here
            built = parts.built = build(named)
    except UserError as error:
        _one_by_one(named, parts, str(error))
    else:
        parts.placement, parts.prepared, parts.plan, parts.spec = (
            built.placement,
            built.prepared,
            built.plan,
            built.spec,
        )
        parts.target = _target(config)
    return parts


def without_measuring(config: RunConfig) -> tuple[RunConfig, bool]:
    """The config, with devices named where `auto` would measure: as many inline ranks as train.accumulation allows.
    And whether that was so."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = config.devices
    if count < 2 or devices.inline is not None or devices.targets is not None:
        return config, False
    ranks = max(ranks for ranks in range(1, count + 1) if config.train.accumulation % ranks == 0)
    named = devices.model_copy(update={"inline": tuple(f"cuda:{number}" for number in range(ranks))})
    return config.model_copy(update={"devices": named}), True


def _target(config: RunConfig) -> Any:
    return load_config(config.target.model, trust_remote_code=config.target.trust_remote_code)


def _one_by_one(config: RunConfig, parts: Parts, refusal: str) -> None:
    """The steps of `build`, each as far as those before it allow. refusal: what `build` said."""
    refusals, model, wish = parts.refusals, config.target.model, config.drafter
    parts.placement = attempt(refusals, DRAFTER, "devices", lambda: settle(config.devices, config.train.accumulation))
    parts.target = attempt(refusals, TARGET, "config", lambda: _target(config))
    shape = None if parts.target is None else attempt(refusals, TARGET, "config", lambda: read_shape(parts.target))
    tokenizer = attempt(refusals, TARGET, "tokenizer", lambda: load_tokenizer(model))
    prepared = parts.prepared = attempt(refusals, DATA, "prepared set", lambda: PreparedSet.open(config.data.prepared))
    mask = 0  # sizes do not depend on it
    if prepared is not None:
        parts.plan = attempt(
            refusals, DATA, "batches", lambda: BatchPlan(prepared, config.data.token_budget, config.seed)
        )
        if tokenizer is not None:
            attempt(refusals, DATA, "tokenizer", lambda: check_tokenizer(prepared, tokenizer, model))
            if shape is not None:
                found = attempt(
                    refusals, DRAFTER, "mask token",
                    lambda: resolve_mask_token(wish.mask_token_id, tokenizer, shape.vocab_size, prepared),
                )  # fmt: skip
                mask = mask if found is None else found[0]
    if shape is not None:
        parts.spec = attempt(refusals, DRAFTER, "sizes", lambda: resolve_spec(wish, shape, mask))
    if refusal not in (finding.found for finding in refusals):
        refusals.append(Finding(CONFIG, "train", "error", refusal, REFUSED))


# --- data -------------------------------------------------------------------------------------------------------------


def data(prepared: PreparedSet, plan: BatchPlan | None) -> Iterator[Finding]:
    info = prepared.info
    arguments = f"; template arguments {json.dumps(info.template_kwargs)}" if info.template_kwargs else ""
    found = (
        f"{prepared.folder}: {info.documents:,} documents, {info.tokens:,} tokens, longest {info.longest:,}; "
        f"made with {info.model}{arguments}"
    )
    yield Finding(DATA, "prepared set", "ok", found)
    yield rows(prepared)
    yield trained_tokens(info.trained_tokens, info.tokens)
    if plan is not None:
        yield documents(plan)
        yield batches(plan)


def rows(prepared: PreparedSet) -> Finding:
    info = prepared.info
    dropped = info.rows - info.kept_rows
    found = f"{dropped:,} of {info.rows:,} dropped by prepare"
    if dropped <= LOST_SHARE * info.rows:
        return Finding(DATA, "rows", "ok", found)
    reasons = sorted(info.dropped.items(), key=lambda item: -item[1])[:3]
    consequence = "nothing is learned from them: " + ", ".join(f"{count:,} {reason}" for reason, count in reasons)
    remedy = f"{prepared.folder / DROPPED_FILE} names each row and its reason"
    return Finding(DATA, "rows", "warning", found, consequence, remedy)


def trained_tokens(trained: int, tokens: int) -> Finding:
    share = trained / max(1, tokens)
    found = f"{trained:,} of {tokens:,} ({share:.1%})"
    if share >= TRAINED_SHARE:
        return Finding(DATA, "trained tokens", "ok", found)
    remedy = "look at `draftmill prepare … --preview 3`: turns or template arguments may be the wrong ones"
    if not trained:
        return Finding(DATA, "trained tokens", "error", found, "there is nothing to learn", remedy)
    consequence = "the target computes many states for little that the drafter learns"
    return Finding(DATA, "trained tokens", "warning", found, consequence, remedy)


def documents(plan: BatchPlan) -> Finding:
    """How many do not fit the budget."""
    count = len(plan.prepared)
    found = (
        f"{plan.cut_documents:,} of {count:,} cut to {plan.token_budget:,} tokens ({plan.cut_documents / count:.1%}), "
        f"{plan.left_out_documents:,} left out ({plan.left_out_documents / count:.1%})"
    )
    if max(plan.cut_documents, plan.left_out_documents) <= LOST_SHARE * count:
        return Finding(DATA, "documents", "ok", found)
    consequence = "ends of long answers, and answers that begin late, are never trained"
    remedy = f"raise data.token_budget; the longest document has {plan.prepared.info.longest:,} tokens"
    return Finding(DATA, "documents", "warning", found, consequence, remedy)


def batches(plan: BatchPlan) -> Finding:
    found = f"{plan.batches_per_epoch:,} of {plan.token_budget:,} tokens in an epoch, {plan.padding_share:.1%} padding"
    if plan.padding_share <= PADDING_SHARE:
        return Finding(DATA, "batches", "ok", found)
    consequence = "memory, the hand-over and the drafter's context pass spend that share on nothing"
    remedy = "try another data.token_budget: long against the documents, short against the whole set"
    return Finding(DATA, "batches", "warning", found, consequence, remedy)


def schedule(config: RunConfig, built: Built) -> Iterator[Finding]:
    """Steps and whether the data suffices for one; positions that the target was not made for."""
    accumulation, epochs = config.train.accumulation, config.train.epochs
    available = epochs * built.plan.batches_per_epoch
    passes = built.total_steps * accumulation / built.plan.batches_per_epoch
    found = f"{built.total_steps:,} steps, batches in each: {accumulation}; {passes:.3g} passes over the data"
    if available < accumulation:
        consequence = f"train.epochs={epochs} has {available} batches, too few for one step: the one step repeats some"
        remedy = f"set train.accumulation={available} or less, raise train.epochs, or prepare more data"
        yield Finding(DATA, "schedule", "warning", found, consequence, remedy)
    else:
        yield Finding(DATA, "schedule", "ok", found)
    longest, known = min(built.prepared.info.longest, config.data.token_budget), built.spec.max_position_embeddings
    if longest > known:
        found = f"documents of up to {longest:,} tokens, but the target is made for {known:,}"
        consequence = "its states behind that may be of no use, and it is not served that far"
        yield Finding(DATA, "positions", "warning", found, consequence, f"data.token_budget={known} cuts them there")


# --- drafter and devices ----------------------------------------------------------------------------------------------


def drafter(config: RunConfig, parts: Parts) -> Iterator[Finding]:
    if (spec := parts.spec) is not None:
        found = (
            f"{parameters(spec) / 1e6:.1f} M parameters: {spec.layers} layers, block {spec.block_size}, hidden "
            f"{spec.hidden_size}, MLP {spec.intermediate_size}, {spec.num_attention_heads} heads of {spec.head_dim}, "
            f"{spec.num_key_value_heads} for keys and values"
        )
        yield Finding(DRAFTER, "sizes", "ok", found)
        yield Finding(DRAFTER, "taps", "ok", f"layers {list(spec.taps)} of the target's {spec.num_target_layers}")
    if parts.built is not None:
        yield Finding(DRAFTER, "mask token", "ok", f"{parts.built.spec.mask_token_id}: {parts.built.mask_origin}")
    if parts.placement is not None:
        yield devices(config, parts.placement, auto=parts.auto)
        if spec is not None:
            yield kernels(config, spec, parts.placement.drafters[0])


def devices(config: RunConfig, placement: Placement, *, auto: bool) -> Finding:
    cores, threads = available_cpus(), threads_per_process(config.threads, placement.processes)
    found = f"{placement.describe()}; processes: {placement.processes}, CPU threads in each: {threads}"
    if auto:
        found = (
            f"auto: `train` measures target and drafter on cuda:0 and chooses. What follows is for {placement.ranks} "
            f"of {torch.cuda.device_count()} GPUs, each with both"
        )
    if threads * placement.processes > cores:
        consequence = f"only {cores} cores may be used: threads wait for each other"
        fitting = cores // placement.processes
        remedy = f"set threads={fitting}" if fitting else "use fewer processes, or more cores"
        return Finding(DRAFTER, "devices", "warning", found, consequence, remedy)
    return Finding(DRAFTER, "devices", "ok", found)


def kernels(config: RunConfig, spec: DrafterSpec, device: str) -> Finding:
    """Which step the drafter computes. Without triton `build` refuses."""
    if not device.startswith("cuda"):
        return Finding(DRAFTER, "kernels", "ok", "plain step, as always on a CPU")
    if config.train.kernels == "plain":
        return Finding(DRAFTER, "kernels", "ok", "plain step, several times slower than the fused one, as you said")
    if reason := plain_because(config, spec):
        remedy = "change that, or accept it with train.kernels=plain"
        return Finding(DRAFTER, "kernels", "warning", reason, "the step runs plain, several times slower", remedy)
    return Finding(DRAFTER, "kernels", "ok", "fused step")


# --- run folder -------------------------------------------------------------------------------------------------------


def run_folder(config: RunConfig, built: Built | None) -> Finding:
    """Whether `train` may write there, and what it finds."""
    folder = RunFolder(config.run_dir)
    another = "choose another run_dir"
    try:
        if why := not_writable(folder.root):
            return Finding(RUN, "run_dir", "error", why, "`draftmill train` stops at once", another)
        if folder.is_locked():
            found, remedy = f"{folder.root} is in use by a run that is still going", f"wait for it, or {another}"
            return Finding(RUN, "run_dir", "error", found, REFUSED, remedy)
        latest = newest_checkpoint(folder)
        if latest is None and not folder.metrics.exists():
            return Finding(RUN, "run_dir", "ok", f"{folder.root} can be written and holds no run")
        return _held(config, folder, latest, built)
    except OSError as error:
        found = f"{error.filename or folder.root} cannot be read ({error.strerror})"
        return Finding(RUN, "run_dir", "error", found, "`draftmill train` stops at once", another)


def _held(config: RunConfig, folder: RunFolder, latest: Checkpoint | None, built: Built | None) -> Finding:
    """What to do about the run that is there already."""
    at = "without a checkpoint" if latest is None else f"at step {latest.step}"
    changed = "; ".join(changes(folder.config, config))
    found = f"{folder.root} holds a run {at}" + (f"; changed since it began: {changed}" if changed else "")
    if latest is not None and built is not None:
        try:
            check_same_run(latest, built.spec, identity(config, built))
        except UserError as error:
            return Finding(
                RUN, "run_dir", "error", f"{found}. {error}", "`draftmill train` refuses this, resumed or not"
            )
    goes_on = "begins at step 0" if latest is None else f"goes on behind step {latest.step}, if its files are whole"
    remedy = f"add --resume, which {goes_on}; or choose another run_dir"
    return Finding(RUN, "run_dir", "warning", found, "`draftmill train` refuses this without --resume", remedy)


def newest_checkpoint(folder: RunFolder) -> Checkpoint | None:
    """By its name and state.json. `train` also checks every byte, which takes long for a large drafter."""
    for manifest in sorted(folder.checkpoints.glob("step-*/manifest.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError):
            state = json.loads((manifest.parent / "state.json").read_text())
            return Checkpoint(manifest.parent, int(state["step"]), state)
    return None
