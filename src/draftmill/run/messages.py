"""What supervisor and workers tell each other. Small, immutable, picklable; hidden states never travel this way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# --- to a worker


@dataclass(frozen=True, slots=True)
class Work:
    """To a target: compute batch `index` into `slot` of the pool of `rank`."""

    lease: int
    index: int
    rank: int
    slot: int


@dataclass(frozen=True, slots=True)
class Share:
    """To a target: write embedding and head into the shared matrices."""


@dataclass(frozen=True, slots=True)
class Rings:
    """To a target: handles of the slots in the drafters' device memory, by rank."""

    handles: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """To a target: decode some prompts with the checkpoint at `path`."""

    path: str


@dataclass(frozen=True, slots=True)
class Matrices:
    """To a drafter: embedding and head are in the shared memory. What the target said of itself comes along."""

    target: TargetFacts


@dataclass(frozen=True, slots=True)
class Batch:
    """To a drafter: batch `index` is in `slot`."""

    index: int
    slot: int


@dataclass(frozen=True, slots=True)
class MayBegin:
    """To an inline rank: optimizer steps below `steps` may be begun."""

    steps: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Save and end. To drafters: after `steps` whole steps. check: decode for real before leaving (an inline rank)."""

    steps: int = 0
    check: bool = False


@dataclass(frozen=True, slots=True)
class Profile:
    """Record the next `steps` optimizer steps, or batches of a target, for `draftmill profile`; into `folder`."""

    folder: str
    steps: int


# --- from a worker


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a loaded target says of itself. tied: embedding and head are one matrix."""

    fingerprint: str
    isolation: str
    tied: bool
    rows: int
    hidden_size: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life, once a second and at each change of phase that is rare: what the worker does. Times in seconds.

    phase: since `in_phase`. activity, what: a piece of work, such as "forward" of "batch 812"; or the phase again, and
    how far. still: since the last progress in it; None while it only waits to be given work. moved: since the last
    progress of any kind. usual, longest: how long the activity took before in this process; None, 0 if never. waited:
    so far for a slot or a batch, in `steady` seconds since the first batch.
    """

    phase: str
    in_phase: float
    activity: str
    what: str | None
    still: float | None
    moved: float
    usual: float | None
    longest: float
    waited: float
    steady: float


@dataclass(frozen=True, slots=True)
class Recompiled:
    """A kernel was compiled after the first batch. what: which, and why."""

    what: str


@dataclass(frozen=True, slots=True)
class Loaded:
    facts: TargetFacts


@dataclass(frozen=True, slots=True)
class Shared:
    """Embedding and head are written."""


@dataclass(frozen=True, slots=True)
class Done:
    """The states of a lease are in their slot."""

    lease: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A lease's batch could not be computed."""

    lease: int
    reason: str


@dataclass(frozen=True, slots=True)
class RingReady:
    """A drafter's slots lie in its device's memory; this handle opens them."""

    handle: bytes


@dataclass(frozen=True, slots=True)
class Begun:
    """An inline rank begins an optimizer step."""

    step: int


@dataclass(frozen=True, slots=True)
class Released:
    """A drafter is done with a batch."""

    index: int


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the console."""

    text: str


@dataclass(frozen=True, slots=True)
class Log:
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Saved:
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A drafter has saved its last step and leaves. finished: the schedule was completed."""

    step: int
    finished: bool


@dataclass(frozen=True, slots=True)
class Checked:
    """Outcome of the decode check: the record for the status file, and the line for the console."""

    result: dict[str, Any] | None
    text: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The worker's last word. user_error: the reason is the user's to mend, and starting anew would not help."""

    reason: str
    user_error: bool
    traceback: str = ""
