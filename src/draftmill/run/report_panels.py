"""Which curves and heat maps the report shows, of one run or of several over each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftmill.run.report_charts import COLORS, Axis, Curve, Values, axis, chart, heat_map, running_mean
from draftmill.run.report_files import Run, as_number, numbers
from draftmill.run.report_html import Markup, card, join, note, percent, shown, table, tag

MOST_POINTS = 600  # of a curve: more than a chart has pixels across
ALL_POINTS = 6000  # of a chart, however many runs share it: the page stays below 2 MB
SMOOTH_SHARE = 20  # running means go over a twentieth of the lines

SLOT_KEYS = (
    ("slot_acceptance", "accepted, if reached"),
    ("slot_top1", "first choice right"),
    ("slot_top4", "among the first 4"),
    ("slot_top8", "among the first 8"),
)


@dataclass(frozen=True, slots=True)
class Panel:
    """keys: (key of metrics.jsonl, with a dot for nested ones; name). scale: from its unit to the shown one. ends: the
    axis reaches at least there."""

    title: str
    keys: tuple[tuple[str, str], ...]
    unit: str = ""
    scale: float = 1.0
    smooth: bool = True
    ends: tuple[float, ...] = ()
    log: bool = False


PANELS = (
    Panel("Loss", (("loss", "loss"),)),
    Panel("τ, teacher-forced", (("tau_teacher_forced", "τ"),), "tokens per block"),
    Panel("Accuracy over all slots", (("accuracy", "accuracy"),), "%", 100.0),
    Panel("Gradient norm, before clipping", (("gradient_norm", "norm"),), log=True),
    Panel("Learning rate", (("lr", "rate"),), smooth=False, ends=(0.0,)),
    Panel("Throughput", (("tokens_per_second", "tokens/s"),), "context tokens/s", smooth=False, ends=(0.0,)),
    Panel(
        "Time spent waiting",
        (("waits.targets_wait", "targets, for a slot"), ("waits.drafters_wait", "drafters, for a batch")),
        "%",
        100.0,
        ends=(0.0, 100.0),
    ),
    Panel("Slots of the queue in use", (("waits.slots_in_use", "slots"),), "slots", ends=(0.0,)),
)


@dataclass(frozen=True, slots=True)
class Way:
    """One of the two horizontal axes. xs: for each run the place of each of its lines."""

    name: str
    axis: Axis
    xs: tuple[Values, ...]


def ways(runs: Sequence[Run]) -> tuple[Way, Way]:
    """Over steps and over the time in training, in the unit that suits the longest run."""
    steps = tuple(run.column("step") for run in runs)
    longest = max((s for run in runs for s in run.seconds if s is not None), default=0.0)
    unit, length = time_unit(longest)
    times = tuple([None if s is None else s / length for s in run.seconds] for run in runs)
    last = max((step for column in steps for step in column if step is not None), default=0.0)
    return (
        Way("step", Axis(0.0, last or 1.0, "optimizer step", whole=True), steps),
        Way("time", Axis(0.0, longest / length or 1.0, unit), times),
    )


def time_unit(seconds: float) -> tuple[str, float]:
    """(name, seconds) of the unit in which a time is a handy number."""
    if seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)


def switch(title: str) -> Markup:
    """A heading with the choice of the horizontal axis; its two inputs stand at the top of the page."""
    labels = [tag("label", tag("span", text), for_=f"by-{name}") for name, text in _WAYS]
    return tag("div", tag("h2", title), *labels, class_="switch")


def switch_inputs() -> Markup:
    return Markup('<input type="radio" name="way" id="by-step" checked><input type="radio" name="way" id="by-time">')


_WAYS = (("step", "over steps"), ("time", "over time in training"))


def color(number: int) -> str:
    """Classes of the n-th run: eight colours, then the same dashed."""
    return f"c{number % COLORS}" + (f" d{number // COLORS}" if number >= COLORS else "")


def swatch(classes: str) -> Markup:
    return Markup(
        f'<svg class="key" viewBox="0 0 22 10" aria-hidden="true"><path class="curve {classes}" d="M1,5L21,5"/></svg>'
    )


def legend(entries: Sequence[tuple[str, str]], class_: str = "legend") -> Markup:
    """entries: (classes, label)."""
    return tag("div", *[tag("span", swatch(classes), label) for classes, label in entries], class_=class_)


# --- curves


@dataclass(frozen=True, slots=True)
class Series:
    """A key of one run. run: its number among the runs of the page."""

    run: int
    label: str
    style: str
    values: Values


def curve_cards(runs: Sequence[Run]) -> Markup:
    """One card for each panel that has something to show; of several runs one for each key."""
    both, cards = ways(runs), []
    for panel in PANELS:
        for part in [panel] if len(runs) == 1 else [_only(panel, key, name) for key, name in panel.keys]:
            series = _series(part, runs)
            if any(value is not None for one in series for value in one.values):
                cards.append(_card(part, series, runs, both))
    return tag("div", *cards, class_="cards")


def _only(panel: Panel, key: str, name: str) -> Panel:
    title = panel.title if len(panel.keys) == 1 else f"{panel.title}: {name}"
    return Panel(title, ((key, name),), panel.unit, panel.scale, panel.smooth, panel.ends, panel.log)


def column(run: Run, key: str) -> list[float | None]:
    """Values of a key, which may be nested."""
    first, _, second = key.partition(".")
    if not second:
        return run.column(first)
    inner: list[Any] = [row.get(first) for row in run.rows]
    return [as_number(values.get(second)) if isinstance(values, dict) else None for values in inner]


def _series(panel: Panel, runs: Sequence[Run]) -> list[Series]:
    """Coloured by key where there is one run, and by run where there are several."""
    found = []
    for number, run in enumerate(runs):
        for place, (key, name) in enumerate(panel.keys):
            label, style = (name, color(place)) if len(runs) == 1 else (run.label, color(number))
            values = [None if v is None else v * panel.scale for v in column(run, key)]
            found.append(Series(number, label, style, values))
    return found


def _card(panel: Panel, series: Sequence[Series], runs: Sequence[Run], both: Sequence[Way]) -> Markup:
    alone = runs[0] if len(runs) == 1 else None
    entries = [(one.style, one.label) for one in series] if alone and len(series) > 1 else []
    drawn = [tag("div", _drawn(panel, series, way, alone), class_=f"by-{way.name}") for way in both]
    return card(panel.title, legend(entries) if entries else "", *drawn)


def _drawn(panel: Panel, series: Sequence[Series], way: Way, alone: Run | None) -> Markup:
    """alone: the run, where it is the only one. It shows each line, levels and restarts too."""
    curves = []
    for one in series:
        xs, values = way.xs[one.run], one.values
        width = max(1, len(values) // SMOOTH_SHARE) if panel.smooth else 1
        if width == 1:
            curves.append(Curve(one.label, xs, values, one.style))
            continue
        if alone:
            curves.append(Curve(f"{one.label}, each line", xs, values, f"{one.style} faint"))
        label = f"{one.label}, running mean" if alone else one.label
        curves.append(Curve(label, xs, running_mean(values, width, log=panel.log), one.style))
    levels = _levels(panel, alone) if alone else []
    marks = [way.xs[0][index] for index in alone.starts if index] if alone else []
    ends = [*panel.ends, *[level for _, level in levels]]
    y = axis([v for curve in curves for v in curve.ys], panel.unit, include=ends, log=panel.log)
    points = max(100, min(MOST_POINTS, ALL_POINTS // len(curves)))
    return Markup(chart(panel.title, curves, way.axis, y, points=points, levels=levels, marks=marks))


def _levels(panel: Panel, run: Run) -> list[tuple[str, float | None]]:
    """What a curve is to be compared with."""
    if panel.keys[0][0] == "tau_teacher_forced":
        return [("decoded, evaluation", run.evaluated_tau)] if run.evaluated_tau is not None else []
    if panel.keys[0][0] == "gradient_norm":
        clip = as_number(run.config.get("train.clip"))
        return [("clipped above", clip)] if clip is not None and clip > 0 else []
    return []


# --- slots


def slot_cards(run: Run) -> Markup:
    """The last lines by slot, and each list over the run as a heat map."""
    both = ways([run])
    cards = [_slot_curves([run], [(key, name, color(n)) for n, (key, name) in enumerate(SLOT_KEYS)])]
    for key, name in SLOT_KEYS:
        lists = [numbers(row, key) for row in run.rows]
        if any(lists):
            maps = [
                tag("div", Markup(heat_map(name, way.xs[0], lists, way.axis)), class_=f"by-{way.name}") for way in both
            ]
            cards.append(card(f"Slots over the run: {name}", _ramp(), *maps))
    return tag("div", *cards, class_="cards")


def slot_comparison(runs: Sequence[Run]) -> Markup:
    """The last lines by slot, of several runs over each other."""
    return tag("div", *[_slot_curves(runs, [(key, name, "")]) for key, name in SLOT_KEYS[:2]], class_="cards")


def _slot_curves(runs: Sequence[Run], keys: Sequence[tuple[str, str, str]]) -> Markup:
    curves = []
    for number, run in enumerate(runs):
        for key, name, style in keys:
            values = [None if v is None else 100 * v for v in run.slots(key)]
            xs = [float(slot) for slot in range(1, len(values) + 1)]
            label, style = (name, style) if len(runs) == 1 else (run.label, color(number))
            curves.append(Curve(label, xs, values, style))
        if len(runs) == 1 and (decoded := evaluated_slots(run, "slots")):
            xs = [float(slot) for slot in range(1, len(decoded) + 1)]
            style = f"c{len(keys)}"
            curves.append(
                Curve("accepted if reached, decoded in the evaluation", xs, [_hundred(v) for v in decoded], style)
            )
    last = max((x for curve in curves for x in curve.xs if x is not None), default=1.0)
    y = axis([v for curve in curves for v in curve.ys], "%", include=(0.0, 100.0))
    title = "By slot, last twentieth of the lines" + ("" if len(runs) == 1 else f": {keys[0][1]}")
    entries = [(curve.style, curve.label) for curve in curves] if len(runs) == 1 else []
    return card(
        title,
        legend(entries) if entries else "",
        Markup(chart(title, curves, Axis(0.5, last + 0.5, "slot", whole=True), y, points=MOST_POINTS)),
    )


def _hundred(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _ramp() -> Markup:
    """Colours of the heat maps: viridis."""
    stops = ", ".join(("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725"))
    return tag("p", "0 %", tag("span", class_="ramp", style=f"background: linear-gradient(90deg, {stops})"), "100 %")


def slot_table(run: Run) -> Markup:
    """Every slot's numbers over the last twentieth of the lines, and those of the evaluation."""
    loss = run.slots("slot_loss")
    shares = [run.slots(key) for key, _ in SLOT_KEYS]
    decoded = [evaluated_slots(run, key) for key in ("slots", "slots_unconditional")]
    count = max(map(len, [loss, *shares, *decoded]))
    headings = ["slot", "−log\u00a0q", "accepted, if reached", "top 1", "top 4", "top 8"]
    headings += ["decoded, if reached", "decoded, of all blocks"] if any(decoded) else []
    rows = []
    for slot in range(count):
        cells = [percent(_at(values, slot)) for values in [*shares, *(decoded if any(decoded) else [])]]
        rows.append([slot + 1, shown(_at(loss, slot), ".3f"), *cells])
    lines = max(1, len(run.rows) // SMOOTH_SHARE)
    about = note(
        f"Means over the last {lines} lines of metrics.jsonl. If reached: among the blocks in which all slots before "
        "were right; 0 where that never happened. Top k: the right token is among the first k choices."
    )
    return join(about, table(headings, rows))


def evaluated_slots(run: Run, key: str) -> list[float | None]:
    acceptance = run.slices[0].get("acceptance") if run.slices else None
    return numbers(acceptance, key) if isinstance(acceptance, dict) else []


def _at(values: Sequence[float | None], place: int) -> float | None:
    return values[place] if place < len(values) else None
