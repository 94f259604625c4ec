"""What the supervisor of a run tells the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftmill.run.messages import Checked, TargetFacts


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the supervisor tells the run. log: rank 0's values of an interval and the waits in it. saved: a step's
    checkpoint, and the seconds it took. target_loaded: may
    raise, for another target than before. rewound: to a step, after the drafters were lost. changed: who does what, for
    the status file. happened: an event, by kind, text and details."""

    log: Callable[[dict[str, Any]], None]
    saved: Callable[[int, float], None]
    target_loaded: Callable[[TargetFacts, str], None]
    rewound: Callable[[int], None]
    changed: Callable[[dict[str, Any]], None]
    checked: Callable[[Checked | None], None]
    began: Callable[[], None]
    checking: Callable[[], None]
    say: Callable[[str], None]
    happened: Callable[..., None]
