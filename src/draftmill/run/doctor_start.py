"""The part of `draftmill doctor` that costs nothing, for the start of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from draftmill.config import RunConfig
from draftmill.run.build import Built
from draftmill.run.doctor import Finding
from draftmill.run.doctor_checks import Parts, data, devices, schedule
from draftmill.run.doctor_room import Room, disk_space
from draftmill.run.doctor_target import look_at_cache, recurrent_layers, weights
from draftmill.run.placement import available_memory
from draftmill.target.shape import load_config


def heed(config: RunConfig, built: Built, say: Callable[[str], None]) -> None:
    """Say what is not well, a warning a line. What cannot work at all is refused elsewhere, by what it concerns."""
    for finding in cheap_findings(config, built):
        if finding.level != "ok":
            words = [f"{finding.group}, {finding.name}: {finding.found}", finding.consequence, finding.remedy]
            say(f"warning: {'; '.join(word for word in words if word)}")


def cheap_findings(config: RunConfig, built: Built) -> Iterator[Finding]:
    """Data, threads, the target's files, memory of the host, disk. From headers and counts; no GPU is touched, as the
    process that starts the others must not take memory there."""
    target = load_config(config.target.model, trust_remote_code=config.target.trust_remote_code)
    parts = Parts([], built, built.placement, built.prepared, built.plan, built.spec, target)
    yield from data(built.prepared, built.plan)
    yield from schedule(config, built)
    yield devices(config, built.placement, auto=False)
    cache = look_at_cache(config, parts)
    found, target_bytes = weights(config, target, needed=not cache.complete)
    yield found
    yield from recurrent_layers(config, parts)
    tied = bool(getattr(target, "tie_word_embeddings", False))
    yield Room(config, built, 0 if cache.complete else target_bytes, tied).host(available_memory())
    yield from disk_space(config, built, cache.missing_bytes)
