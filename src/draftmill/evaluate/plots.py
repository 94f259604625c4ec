"""A picture of a run: loss, acceptance over the steps, acceptance per slot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#2563a8", "#d9722b", "#8a8f98"


def report_png(metrics_rows: Sequence[dict[str, Any]], evaluation: dict[str, Any] | None, path: Path) -> Path:
    """Write the picture to `path` and return it.

    metrics_rows: dicts with `step`, `loss`, `tau_teacher_forced` and `accuracy`, in order. evaluation:
    `Result.to_dict()` of the trained drafter, or None before there is one.
    """
    figure = Figure(figsize=(13.5, 4.0), layout="constrained")
    loss, tau, slots = figure.subplots(1, 3)
    steps = [row["step"] for row in metrics_rows]
    _curve(loss, steps, [row["loss"] for row in metrics_rows], "Loss", "loss")
    _curve(tau, steps, [row["tau_teacher_forced"] for row in metrics_rows], "Tokens per target pass (τ)", "τ")
    _accuracy(tau, steps, [row["accuracy"] for row in metrics_rows])
    overall = evaluation["slices"][0] if evaluation is not None else None
    decoded = overall["acceptance"]["tau"] if overall is not None else None
    if decoded is not None:
        tau.axhline(decoded, color=ORANGE, linewidth=1.2, linestyle="--", label="decoded, evaluation")
    if steps:
        tau.legend(frameon=False, fontsize=8, loc="best")
    _slots(slots, overall)
    figure.savefig(path, dpi=130)
    return path


def _style(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _curve(axes: Axes, steps: list[int], values: list[float], title: str, y: str) -> None:
    """Every point faintly and a running mean over a twentieth of them."""
    _style(axes, title, "optimizer step", y)
    if not steps:
        _nothing(axes, "no steps yet")
        return
    width = max(1, len(values) // 20)
    axes.plot(steps, values, color=BLUE, alpha=0.25 if width > 1 else 1.0, linewidth=1)
    if width > 1:
        axes.plot(steps, _running_mean(values, width), color=BLUE, linewidth=1.8, label="training, teacher-forced")
    else:
        axes.lines[0].set_label("training, teacher-forced")


def _accuracy(axes: Axes, steps: list[int], values: list[float]) -> None:
    if not steps:
        return
    right = axes.twinx()
    width = max(1, len(values) // 20)
    right.plot(steps, _running_mean(values, width), color=GREY, linewidth=1.2)
    right.set_ylim(0, 1)
    right.set_ylabel("accuracy over all slots", color=GREY, fontsize=9)
    right.tick_params(labelsize=8, colors=GREY)
    right.spines["top"].set_visible(False)


def _running_mean(values: list[float], width: int) -> list[float]:
    """Mean of the last `width` values at each point."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / (min(i + 1, width)) for i in range(len(values))]


def _slots(axes: Axes, overall: dict[str, Any] | None) -> None:
    _style(axes, "Acceptance per slot, decoded", "slot", "accepted")
    if overall is None:
        _nothing(axes, "no evaluation yet")
        return
    given, all_of = overall["acceptance"]["slots"], overall["acceptance"]["slots_unconditional"]
    numbers = range(1, len(given) + 1)
    axes.bar(numbers, [value or 0.0 for value in given], color="#c5d8ec", label="if all before it were")
    axes.bar(numbers, [value or 0.0 for value in all_of], color=BLUE, width=0.5, label="of all blocks")
    axes.set_ylim(0, 1.15)  # room for the legend
    axes.set_xticks(list(numbers))
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def _nothing(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
