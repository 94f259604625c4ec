"""The report's charts as pictures, for places that take no HTML page."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftmill.run.report_charts import cells, running_mean, tick_text
from draftmill.run.report_files import Run, numbers
from draftmill.run.report_panels import PANELS, SLOT_KEYS, SMOOTH_SHARE, Panel, column, ways

COLUMNS, WIDTH, HEIGHT = 3, 4.6, 3.0  # of a picture; inches of a chart


def write_pictures(runs: Sequence[Run], page: Path) -> None:
    """PAGE-curves.png and PAGE-slots.png beside the page, each where there is something to show."""
    from matplotlib import rc_context

    shown = [panel for panel in PANELS if any(_has_values(run, panel) for run in runs)]
    keys = SLOT_KEYS if len(runs) == 1 else SLOT_KEYS[:1]
    slots = [(run, key, name) for run in runs for key, name in keys if any(numbers(row, key) for row in run.rows)]
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():  # names are names, whatever is in them
        warnings.simplefilter("ignore", UserWarning)  # such as of letters that the font lacks
        _write(page.with_name(f"{page.stem}-curves.png"), [partial(_curves, panel, runs) for panel in shown])
        _write(page.with_name(f"{page.stem}-slots.png"), [partial(_slots, *one, len(runs) > 1) for one in slots])


def _write(path: Path, charts: Sequence[Callable[[Any], None]]) -> None:
    from matplotlib.figure import Figure

    if not charts:
        return
    rows = -(-len(charts) // COLUMNS)
    figure = Figure((COLUMNS * WIDTH, rows * HEIGHT), layout="constrained")
    for place, draw in enumerate(charts, 1):
        draw(figure.add_subplot(rows, COLUMNS, place))
    figure.savefig(path, dpi=110)


def _has_values(run: Run, panel: Panel) -> bool:
    return any(value is not None for key, _ in panel.keys for value in column(run, key))


def _curves(panel: Panel, runs: Sequence[Run], axes: Any) -> None:
    """Each line faint and its running mean, as on the page; of several runs only the means."""
    for run in runs:
        steps = run.column("step")
        for key, name in panel.keys:
            values = [None if value is None else panel.scale * value for value in column(run, key)]
            if all(value is None for value in values):
                continue
            width = max(1, len(values) // SMOOTH_SHARE) if panel.smooth else 1
            label = " · ".join([run.label] * (len(runs) > 1) + [name] * (len(panel.keys) > 1))
            (line,) = axes.plot(steps, _gaps(running_mean(values, width, log=panel.log)), label=label or None)
            if width > 1 and len(runs) == 1:
                axes.plot(steps, _gaps(values), color=line.get_color(), alpha=0.3, linewidth=0.7)
    axes.set(title=panel.title, xlabel="optimizer step", ylabel=panel.unit, yscale="log" if panel.log else "linear")
    axes.yaxis.set_major_formatter(_tick)
    axes.yaxis.set_minor_formatter(_between_powers if panel.log else "")
    axes.xaxis.set_major_formatter(_tick)
    axes.grid(alpha=0.3)
    if panel.ends:
        axes.set_ylim(bottom=panel.ends[0])
    if len(runs) > 1 or len(panel.keys) > 1:
        axes.legend(fontsize="small")


def _slots(run: Run, key: str, name: str, named: bool, axes: Any) -> None:
    steps, lists = run.column("step"), [numbers(row, key) for row in run.rows]
    ((way, _), slots) = ways([run]), max(map(len, lists))
    ends = (way.axis.low, way.axis.high, slots + 0.5, 0.5)
    shares = cells(steps, lists, way.axis, slots)
    picture = axes.imshow(shares, aspect="auto", extent=ends, vmin=0, vmax=1, interpolation="nearest")
    axes.set(title=f"{name} · {run.label}" if named else name, xlabel="optimizer step", ylabel="slot")
    axes.xaxis.set_major_formatter(_tick)
    axes.figure.colorbar(picture, ax=axes, format="{x:.0%}")


def _tick(value: float, _place: int) -> str:
    return tick_text(value)


def _between_powers(value: float, _place: int) -> str:
    """Only 2 and 5 of each power of ten: more would overlap."""
    return tick_text(value) if f"{value:e}"[0] in "25" else ""


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
