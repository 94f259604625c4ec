"""Which GPU kernels Triton compiles: told while a process warms up, and told apart if it happens later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftmill.run.activity import Activity

MOST_TOLD = 50  # per process, after the first batch: what compiles in every batch would fill the record


class Compiles:
    """Triton's listener. told: is given each kernel that is compiled after the first batch, in words."""

    def __init__(self, activity: Activity, told: Callable[[str], None]) -> None:
        self._activity, self._told = activity, told
        self._kernels = self._cached = self._late = 0
        self._known: dict[str, dict[str, str]] = {}  # kernel → what its newest variant was compiled for

    def __call__(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        """As Triton calls it, behind each kernel that it compiles or takes from its cache on disk."""
        self._kernels += 1
        self._cached += cache_hit
        name, variant = str(src.name), _variant(src)
        before = self._known.get(name)
        self._known[name] = variant
        if not self._activity.warm:
            self._activity.further(f"{self._kernels} kernels, {self._cached} of them from the cache")
            return
        self._late += 1
        if self._late <= MOST_TOLD:
            source = "from the cache on disk" if cache_hit else f"in {times.total / 1e6:.1f} s"
            last = "; further ones are not told" if self._late == MOST_TOLD else ""
            self._told(f"kernel {name} after the first batch, {source}: {_reason(before, variant)}{last}")


def listen(compiles: Compiles) -> None:
    """From now on in this process. Needs Triton."""
    from triton import knobs

    knobs.compilation.listener = compiles


def _variant(src: Any) -> dict[str, str]:
    """Argument → what the kernel is compiled for: its type, its value where that is fixed, its alignment."""
    arguments = {str(name): str(kind) for name, kind in src.signature.items()}
    names = list(arguments)
    for place, value in getattr(src, "constants", {}).items():
        arguments[_argument(place, names)] = f"= {value}"
    for place, hints in getattr(src, "attrs", {}).items():
        if hints:
            name = _argument(place, names)
            arguments[name] = f"{arguments.get(name, '')} {hints}".strip()
    return arguments


def _argument(place: Any, names: list[str]) -> str:
    """place: the argument's number, and where in it, if it is a tuple."""
    name = names[place[0]]
    return name if len(place) == 1 else f"{name}{list(place[1:])}"


def _reason(before: dict[str, str] | None, now: dict[str, str]) -> str:
    if before is None:
        return "it was not needed before"
    changed = [f"{name} is {now[name]}, was {before.get(name)}" for name in now if now[name] != before.get(name)]
    return ", ".join(changed) or "for other options"
