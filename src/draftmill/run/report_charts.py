"""Charts as SVG that stands in the page: curves over steps or time, and heat maps of slots.

Colours are classes (c0 … c7) of the page's style, so that they follow light and dark. Numbers in user units of a view
of WIDTH × HEIGHT, which is about a CSS pixel each on a desktop and on a phone.
"""

from __future__ import annotations

import base64
import bisect
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 400.0, 214.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 8.0, 8.0, 34.0
COLORS = 8
COLUMNS = 120  # of a heat map

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Curve:
    """style: classes of the page's style, for example "c0 faint"."""

    label: str
    xs: Values
    ys: Values
    style: str


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high`, in `unit`. log: powers of ten are evenly spaced; both ends are above 0 then. whole: only
    whole numbers make sense."""

    low: float
    high: float
    unit: str = ""
    log: bool = False
    whole: bool = False

    def place(self, value: float) -> float:
        """0 … 1 within the axis."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int) -> list[float]:
        """About so many round values within the axis."""
        if not self.log or self.high < 8 * self.low:
            return _linear_ticks(self.low, self.high, count, 1.0 if self.whole else 0.0)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = math.log10(self.high / self.low)
        factors = (1, 2, 5) if decades < 1.5 else (1, 3) if decades < 3.5 else (1,)
        found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        inside = [tick for tick in found if self.low <= tick <= self.high]
        return inside[:: max(1, math.ceil(len(inside) / (count + 2)))]


def axis(values: Values, unit: str = "", *, include: Values = (), log: bool = False) -> Axis | None:
    """An axis that holds all values, with some air; `include` are its ends where the values do not reach them. None if
    there is nothing to show."""
    known = [value for value in values if value is not None and (value > 0 or not log)]
    if not known:
        return None
    ends = [value for value in include if value is not None]
    low, high = min([*known, *ends]), max([*known, *ends])
    if log:
        return Axis(low / 1.2, high * 1.2, unit, log=True)
    air = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low if low in ends else low - air, high if high in ends and high > low else high + air, unit)


def chart(
    title: str,
    curves: Sequence[Curve],
    x: Axis,
    y: Axis | None,
    *,
    points: int,
    levels: Sequence[tuple[str, float | None]] = (),
    marks: Values = (),
) -> str:
    """Curves over x. points: most of a curve. levels: (label, y), dashed. marks: x of vertical lines."""
    if y is None:
        return f'<svg {_VIEW} role="img" aria-label="{escape(title)}: nothing yet">{_nothing()}</svg>'
    parts = [_grid(x, y)]
    parts += [f'<path class="mark" d="M{_x(x, at):.1f},{TOP:g}V{HEIGHT - BOTTOM:g}"/>' for at in _within(x, marks)]
    for curve in curves:
        drawn = path(x, y, *thin(curve.xs, curve.ys, points))
        parts.append(f'<path class="curve {curve.style}" data-label="{escape(curve.label)}" d="{drawn}"/>')
    for label, level in levels:
        if level is not None and y.low <= level <= y.high and (level > 0 or not y.log):
            parts.append(_level(label, _y(y, level)))
    ends = f'data-x="{x.low:.8g} {x.high:.8g}" data-y="{y.low:.8g} {y.high:.8g}" data-log="{int(y.log)}"'
    units = f'data-xunit="{escape(x.unit)}" data-yunit="{escape(y.unit)}"'
    return f'<svg {_VIEW} class="chart" role="img" aria-label="{escape(title)}" {ends} {units}>{"".join(parts)}</svg>'


def heat_map(title: str, xs: Values, lists: Sequence[Values], x: Axis) -> str:
    """Shares 0 … 1 of slots 1, 2, … from top to bottom, over x. A line of `lists` holds up to its x."""
    slots = max((len(values) for values in lists), default=0)
    if slots == 0:
        return f'<svg {_VIEW} role="img" aria-label="{escape(title)}: nothing yet">{_nothing()}</svg>'
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    picture = (
        f'<image x="{LEFT:g}" y="{TOP:g}" width="{width:g}" height="{height:g}" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{_png(cells(xs, lists, x, slots))}"/>'
    )
    stride = max(1, math.ceil(slots / 9))
    rows = []
    for slot in range(1, slots + 1, stride):
        y = TOP + height * (slot - 0.5) / slots
        rows.append(f'<text class="tick end" x="{LEFT - 6:g}" y="{y + 4:.1f}">{slot}</text>')
    text = f'<text class="unit" transform="translate(11,{TOP + height / 2:g}) rotate(-90)">slot</text>'
    return f'<svg {_VIEW} role="img" aria-label="{escape(title)}">{picture}{_x_axis(x)}{"".join(rows)}{text}</svg>'


def thin(xs: Values, ys: Values, points: int) -> tuple[list[float], list[float | None]]:
    """At most `points` of a curve, with the lowest and the highest of each stretch, so that no spike is lost. A
    stretch without any value becomes a gap."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None]
    if len(pairs) <= points:
        return [x for x, _ in pairs], [y for _, y in pairs]
    kept: list[tuple[float, float | None]] = []
    stretches = max(1, points // 2)
    for number in range(stretches):
        stretch = pairs[number * len(pairs) // stretches : (number + 1) * len(pairs) // stretches]
        known = [(y, x) for x, y in stretch if y is not None]
        if not known:
            kept.append((stretch[0][0], None))
            continue
        found = sorted({min(known)[::-1], max(known)[::-1]})
        kept += found
    return [x for x, _ in kept], [y for _, y in kept]


def running_mean(values: Values, width: int, *, log: bool = False) -> list[float | None]:
    """Mean of those of about `width` values around each that are there: around, so that it does not lag.

    log: of the logarithms, for an axis of powers of ten, where one spike would hide everything around it.
    """
    parts = [(math.log(v) if v > 0 else None) if log and v is not None else v for v in values]
    sums, counts = [0.0], [0]
    for part in parts:
        sums.append(sums[-1] + (part or 0.0))
        counts.append(counts[-1] + (part is not None))
    found: list[float | None] = []
    half = width // 2
    for place in range(len(values)):
        first, end = max(0, place - half), min(len(values), place + half + 1)
        count = counts[end] - counts[first]
        mean = (sums[end] - sums[first]) / count if count else None
        found.append(math.exp(mean) if log and mean is not None else mean)
    return found


def path(x: Axis, y: Axis, xs: Sequence[float], ys: Values) -> str:
    """A line with gaps where a value is missing. A point alone becomes a dot."""
    strokes: list[list[str]] = [[]]
    for at, value in zip(xs, ys, strict=True):
        if value is None or (y.log and value <= 0):
            strokes.append([])
        else:
            strokes[-1].append(f"{_x(x, at):.1f},{_y(y, value):.1f}")
    return "".join("M" + ("L".join(stroke) if len(stroke) > 1 else f"{stroke[0]}h0") for stroke in strokes if stroke)


def tick_text(value: float) -> str:
    """12k, 3.5M, 0.25, 2e-5: short enough for an axis."""
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.4g}{suffix}" if size < 1e13 else f"{value:.3g}"
    short = f"{value:.3e}" if 0 < size < 1e-3 else f"{value:.4g}"
    digits, e, power = short.partition("e")
    return f"{float(digits):g}{e}{int(power) if e else ''}".replace("-", "−")


# --- pieces

_VIEW = f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}"'


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)


def _within(axis: Axis, values: Values) -> list[float]:
    return [value for value in values if value is not None and axis.low <= value <= axis.high]


def _nothing() -> str:
    return f'<text class="unit" x="{WIDTH / 2:g}" y="{HEIGHT / 2:g}">nothing recorded yet</text>'


def _grid(x: Axis, y: Axis) -> str:
    parts = []
    for tick in y.ticks(6):
        at = _y(y, tick)
        parts.append(f'<path class="grid" d="M{LEFT:g},{at:.1f}H{WIDTH - RIGHT:g}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6:g}" y="{at + 4:.1f}">{tick_text(tick)}</text>')
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    unit = f'<text class="unit" transform="translate(11,{middle:g}) rotate(-90)">{escape(y.unit)}</text>'
    return "".join(parts) + unit + _x_axis(x)


def _x_axis(x: Axis) -> str:
    bottom = HEIGHT - BOTTOM
    parts = [f'<path class="frame" d="M{LEFT:g},{bottom:g}H{WIDTH - RIGHT:g}"/>']
    for tick in x.ticks(6):
        at = _x(x, tick)
        anchor = "tick mid" if at < WIDTH - 20 else "tick end"
        shown = at if anchor == "tick mid" else WIDTH
        parts.append(f'<text class="{anchor}" x="{shown:.1f}" y="{bottom + 14:g}">{tick_text(tick)}</text>')
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    return "".join(parts) + f'<text class="unit" x="{middle:g}" y="{HEIGHT - 4:g}">{escape(x.unit)}</text>'


def _level(label: str, at: float) -> str:
    line = f'<path class="level" d="M{LEFT:g},{at:.1f}H{WIDTH - RIGHT:g}"/>'
    above = at - 4 if at > TOP + 14 else at + 12
    return line + f'<text class="tick end" x="{WIDTH - RIGHT - 2:g}" y="{above:.1f}">{escape(label)}</text>'


def _linear_ticks(low: float, high: float, count: int, least: float) -> list[float]:
    rough = max((high - low) / count, least)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def cells(xs: Values, lists: Sequence[Values], x: Axis, slots: int) -> np.ndarray:
    """[slots, COLUMNS]: the mean of the lines in each column, or the line that covers it; NaN where there is none."""
    known = [(at, values) for at, values in zip(xs, lists, strict=True) if at is not None and values]
    known.sort(key=lambda pair: pair[0])
    ends = [at for at, _ in known]
    table = np.full((len(known), slots), np.nan)
    for row, (_, values) in enumerate(known):
        table[row, : len(values)] = [np.nan if value is None else value for value in values]
    cells = np.full((slots, COLUMNS), np.nan)
    for column in range(COLUMNS):
        left, right = (x.low + (x.high - x.low) * (column + side) / COLUMNS for side in (0, 1))
        first = bisect.bisect_right(ends, left)
        last = max(bisect.bisect_right(ends, right), first + 1)
        part = table[first:last]
        if len(part):
            there = ~np.isnan(part)
            sums, counts = np.where(there, part, 0.0).sum(0), there.sum(0)
            cells[:, column] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return cells


def _png(cells: np.ndarray) -> str:
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, cells, cmap="viridis", vmin=0.0, vmax=1.0, format="png")
    return base64.b64encode(buffer.getvalue()).decode()
