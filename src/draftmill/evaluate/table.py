"""An evaluation on the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftmill.evaluate.measure import OVERALL, Result, Slice


def print_table(result: Result, console: Console) -> None:
    """One row per slice, the acceptance per slot overall, and every answer that differs from the target's own."""
    sampling = "greedy" if result.temperature == 0 else f"temperature {result.temperature:g}"
    title = f"{sampling}, {result.dtype}, at most {result.max_new_tokens} new tokens, blocks of {result.block_size}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)  # fits 80 columns
    table.add_column("slice", no_wrap=True)
    for heading in ("prompts", "tokens", "τ", "tok/s", "alone", "speed-up", "identical"):
        table.add_column(heading, justify="right")
    parts = result.slices if len(result.slices) > 2 else result.slices[:1]
    for part in parts:
        table.add_row(*_row(part), end_section=part.name == OVERALL)
    console.print(table)
    slots = " ".join(f"{value:.0%}" if value is not None else "–" for value in result.overall.acceptance.slots)
    console.print(f"accepted, slot by slot, where all before were: {slots}", highlight=False)
    _print_mismatches(result.overall, console)


def _row(part: Slice) -> list[str]:
    tau = part.acceptance.tau
    return [
        part.name,
        str(part.prompts),
        str(part.tokens),
        f"{tau:.2f}" if tau is not None else "–",
        f"{part.tokens_per_second:.1f}",
        f"{part.plain_tokens_per_second:.1f}",
        f"{part.speed_up:.2f}×",
        f"{part.identical}/{part.prompts}" if part.identical is not None else "sampled",
    ]


def _print_mismatches(part: Slice, console: Console) -> None:
    for m in part.mismatches:
        what = (
            "a tie within rounding; both answers are the target's"
            if m.tie
            else "too far for rounding: decoding is not lossless here, please report it"
        )
        where = f"line {m.row}, token {m.position}: {m.token} where the target alone gives {m.expected}"
        below = "unknown" if m.gap is None else f"{m.gap:.3g}"
        console.print(f"{where}; {below} below its best logit ({what})", highlight=False)
