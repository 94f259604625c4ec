"""A batch's hidden states, from wherever they can be had soonest: memory, disk, or the target itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from draftmill.config import RunConfig
from draftmill.data.plan import BatchPlan
from draftmill.drafter.config import DrafterSpec
from draftmill.handoff.matrices import is_tied
from draftmill.records import TokenBatch
from draftmill.run.activity import Activity
from draftmill.run.console import say
from draftmill.target.cache import CacheIdentity, StateCache, open_cache, read_identity, target_files
from draftmill.target.capture import Target
from draftmill.target.checks import StateCheck
from draftmill.target.progress import weights_placed
from draftmill.target.reuse import ReusedStates


class States:
    """The target as the rest of a run sees it. With a cache that holds all, its weights are never loaded.

    embedding, head [V, H]; fingerprint, isolation: of the target, or of the one that filled the cache.
    """

    def __init__(
        self,
        target: Target | None,
        reuse: ReusedStates,
        cache: StateCache | None = None,
        *,
        device: str = "cpu",
        load_target: Callable[[], Target] | None = None,
    ) -> None:
        """device, load_target: for a cache without a target, where embedding and head are to lie, and the way out
        should a state turn out to be missing."""
        self.target, self.reuse, self.cache, self._load_target = target, reuse, cache, load_target
        if target is not None:
            self.embedding, self.head = target.embedding, target.head
            self.fingerprint, self.isolation, self.taps = target.fingerprint, target.isolation, target.taps
        else:
            assert cache is not None
            shared = cache.load_shared()
            assert shared is not None
            self.embedding = shared[0].to(device)
            self.head = self.embedding if is_tied(*shared) else shared[1].to(device)
            identity = cache.identity
            self.fingerprint, self.isolation, self.taps = identity.target_fingerprint, identity.isolation, identity.taps

    @property
    def width(self) -> int:
        return len(self.taps) * int(self.embedding.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def begin(self, batch: TokenBatch, features: Tensor) -> StateCheck | None:
        """Bring the batch's states into features [T, K·H]. None: they are there, verified when they were first made.
        Otherwise the target has been given the work; verify the check, then `keep`."""
        if self.reuse.load(batch.bin, features):
            return None
        if self.cache is not None and self.cache.load(batch.bin, features):
            self.reuse.keep(batch.bin, features[: batch.tokens])
            return None
        return self._running_target(batch.bin).begin(batch, features)

    def keep(self, batch: TokenBatch, features: Tensor) -> None:
        """Verified states, for later epochs and runs."""
        self.reuse.keep(batch.bin, features[: batch.tokens])
        if self.cache is not None:
            self.cache.keep(batch.bin, features[: batch.tokens])

    def get(self, batch: TokenBatch, features: Tensor) -> None:
        """`begin`, verify and `keep` in one. Raises ArithmeticError for states nobody should train on."""
        check = self.begin(batch, features)
        if check is not None:
            check.verify()
            self.keep(batch, features)

    def _running_target(self, bin: int) -> Target:
        if self.target is None:
            assert self._load_target is not None
            say(f"the cache lacks the states of bin {bin}: the target is loaded after all")
            self.target = self._load_target()
        return self.target


def open_states(
    config: RunConfig,
    spec: DrafterSpec,
    plan: BatchPlan,
    device: str,
    *,
    bins: Iterable[int],
    activity: Activity,
    share: int = 1,
) -> States:
    """bins: that the run will ask for. share: how many processes divide the memory for reused states. activity: is told
    how far loading has got."""
    activity.enter("loading")
    reuse = ReusedStates(int(config.target.reuse_states_gb * 1e9 / share))

    def load() -> Target:
        say(f"loading target {config.target.model} …")
        started = time.perf_counter()
        activity.enter("loading", "the target")
        with weights_placed(config.target.model, activity.further):
            target = Target(config.target, spec.taps, device=device)
        say(f"target loaded on {device} in {time.perf_counter() - started:.1f} s; documents kept apart by: "
            f"{target.isolation}")  # fmt: skip
        return target

    if config.cache is None:
        return States(load(), reuse)
    wanted = _identity(config, spec, plan)
    known = read_identity(config.cache)
    if known is not None and known == _as_filled(wanted, known, config):
        cache = _open(config, known, plan)
        if cache.complete(bins) and cache.load_shared() is not None:
            say(f"{cache.describe()}; all that is needed is there, so no target is loaded")
            return States(None, reuse, cache, device=device, load_target=load)
    target = load()
    cache = _open(config, replace(wanted, target_fingerprint=target.fingerprint, isolation=target.isolation), plan)
    cache.keep_shared(target.embedding, target.head)
    say(cache.describe())
    return States(target, reuse, cache)


def _as_filled(wanted: CacheIdentity, known: CacheIdentity, config: RunConfig) -> CacheIdentity:
    """What the cache must be to serve without the target: what only the target can tell is taken from the cache."""
    isolation = known.isolation if config.target.isolation == "auto" else config.target.isolation
    return replace(wanted, target_fingerprint=known.target_fingerprint, isolation=isolation)


def _identity(config: RunConfig, spec: DrafterSpec, plan: BatchPlan) -> CacheIdentity:
    return CacheIdentity(
        target_fingerprint="",
        target_files=target_files(config.target.model),
        dtype=config.target.dtype,
        isolation="",
        taps=spec.taps,
        hidden_size=spec.hidden_size,
        data_fingerprint=plan.prepared.info.fingerprint,
        token_budget=plan.token_budget,
        seed=config.seed,
    )


def _open(config: RunConfig, identity: CacheIdentity, plan: BatchPlan) -> StateCache:
    assert config.cache is not None
    itemsize = getattr(torch, config.target.dtype).itemsize
    return open_cache(
        config.cache,
        identity,
        slot_bytes=plan.token_budget * len(identity.taps) * identity.hidden_size * itemsize,
        bins=plan.batches_per_epoch,
        limit_bytes=None if config.cache_gb is None else round(config.cache_gb * 1e9),
        warn=lambda text: say(f"warning: {text}"),
    )


def bins_of(plan: BatchPlan, first: int, end: int) -> list[int]:
    """Bins that batches first … end − 1 need: at most all of an epoch."""
    return sorted({plan.locate(index)[1] for index in range(first, min(end, first + 2 * plan.batches_per_epoch))})
