"""The report as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftmill import __version__
from draftmill.run import report_charts as charts
from draftmill.run.report_details import (
    decode_check,
    evaluation,
    identical,
    interruptions,
    origin,
    skipped,
    slices_compared,
    span,
    time_spent,
    times_compared,
)
from draftmill.run.report_files import LAST_SHARE, Run, flat, number
from draftmill.run.report_html import (
    NONE,
    Markup,
    count,
    fold,
    join,
    moment,
    note,
    percent,
    plain,
    shown,
    table,
    tag,
    tile,
)
from draftmill.run.report_look import STYLE, policy, script
from draftmill.run.report_panels import (
    color,
    curve_cards,
    legend,
    slot_cards,
    slot_comparison,
    slot_table,
    swatch,
    switch,
    switch_inputs,
)
from draftmill.run.words import duration


def page(runs: Sequence[Run]) -> str:
    """The whole page."""
    code = script(charts.LEFT, charts.WIDTH - charts.RIGHT, charts.TOP, charts.HEIGHT - charts.BOTTOM)
    title = f"{runs[0].label}: draftmill run" if len(runs) == 1 else f"{len(runs)} draftmill runs"
    head = join(
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy(code)}">'),
        tag("title", title),
        Markup(f"<style>{STYLE}</style>"),
    )
    body = join(*(_one(runs[0]) if len(runs) == 1 else _several(runs)), _footer(runs))
    end = Markup(f'<div id="tip"></div><script>{code}</script>')
    return "<!doctype html>\n" + tag(
        "html", tag("head", head), tag("body", switch_inputs(), tag("main", body), end), lang="en"
    )


def _one(run: Run) -> list[Markup]:
    return [
        _title(run),
        _tiles(run),
        switch("Curves"),
        _curves([run]),
        switch("Acceptance by slot"),
        slot_cards(run),
        fold("Numbers by slot", slot_table(run)),
        *_details(run),
    ]


def _several(runs: Sequence[Run]) -> list[Markup]:
    names = legend([(color(n), run.label) for n, run in enumerate(runs)], "legend strong")
    return [
        tag("h1", f"{len(runs)} runs side by side"),
        names,
        tag("h2", "Final numbers"),
        _final_numbers(runs),
        switch("Curves"),
        _curves(runs),
        tag("h2", "Acceptance by slot"),
        slot_comparison(runs),
        tag("h2", "Evaluation"),
        slices_compared(runs),
        tag("h2", "Time"),
        times_compared(runs),
        tag("h2", "What differs"),
        _differences(runs),
        tag("h2", "Each run"),
        *[_folded(run, n) for n, run in enumerate(runs)],
    ]


def _folded(run: Run, place: int) -> Markup:
    parts = [_title(run), _tiles(run), slot_cards(run), fold("Numbers by slot", slot_table(run)), *_details(run)]
    return fold(join(swatch(color(place)), run.label), *parts, class_="run")


def _details(run: Run) -> list[Markup]:
    parts = [
        ("Evaluation", evaluation(run)),
        ("Time", time_spent(run)),
        ("Interruptions", interruptions(run)),
        ("What was run", origin(run)),
    ]
    return [join(tag("h2", title), content) for title, content in parts]


# --- headline


def _title(run: Run) -> Markup:
    done = (run.step or 0) / run.total_steps if run.total_steps else 0.0
    inner = tag("div", style=f"width: {100 * min(1.0, max(0.0, done)):.1f}%")
    target, spec = run.record.get("target"), run.record.get("spec")
    facts = [f"target {target}" if target else "", _drafter(spec) if isinstance(spec, dict) else "", str(run.root)]
    return join(
        tag("h1", run.label, tag("span", run.state, class_=f"state {run.state}")),
        tag("p", _where(run), class_="soft"),
        tag("p", " · ".join(fact for fact in facts if fact), class_="soft"),
        tag("div", inner, class_="bar"),
    )


def _where(run: Run) -> str:
    """What the run does, or how it ended."""
    phase, since, heard = (
        run.status.get("phase") or "starting",
        number(run.status, "since"),
        number(run.status, "updated"),
    )
    reason = f": {run.status['reason']}" if run.status.get("reason") else ""
    if run.state == "unknown":
        return "status.json is missing or cannot be read, so how the run ended is unknown"
    if run.state == "running":
        return f"{phase}" + ("" if since is None else f" for {duration(run.now - since)}")
    if run.state == "died":
        return f"died while {phase}, last heard of {moment(heard)}; `draftmill train … --resume` goes on"
    return f"{run.state} {moment(since)}{reason}"


def _drafter(spec: dict[str, Any]) -> str:
    kinds = spec.get("layer_types")
    layers = f"{count(len(kinds), 'layer')}, " if isinstance(kinds, list) else ""
    return f"drafter of {layers}blocks of {plain(spec.get('block_size'))}"


def _tiles(run: Run) -> Markup:
    lines = max(1, len(run.rows) // LAST_SHARE)
    rate, counted = run.steady_tokens_per_second()
    total, step = run.total_steps, run.step
    done = "" if step is None or not total else f"{100 * step / total:.0f} % of {total:,}"
    tiles = [
        tile("step", shown(step), done),
        *[
            tile(
                label, shown(run.last(key), form), f"{shown(run.last_twentieth(key), form)} over the last {lines} lines"
            )
            for label, key, form in (("loss", "loss", ".3f"), ("τ, teacher-forced", "tau_teacher_forced", ".2f"))
        ],
        tile(
            "accuracy",
            percent(run.last("accuracy")),
            f"{percent(run.last_twentieth('accuracy'))} over the last {lines} lines",
        ),
        tile("context tokens/s", shown(rate), f"median of {counted:,} lines since the last start"),
        tile("time in training", span(run.training_seconds), *_time_left(run)),
        _checkpoint_tile(run),
    ]
    return tag("div", *tiles, *_decoded_tiles(run), *_trouble_tiles(run), class_="tiles")


def _time_left(run: Run) -> list[str]:
    if run.state != "running":
        return [] if run.spans else ["before the first line: not recorded"]
    left = number(run.status, "eta_seconds")
    return ["time left: estimating" if left is None else f"{duration(left)} left at the last line"]


def _checkpoint_tile(run: Run) -> Markup:
    if not run.checkpoints:
        return tile("last checkpoint", "none yet")
    step, t = run.checkpoints[-1]
    return tile("last checkpoint", f"step {step:,}", moment(t))


def _decoded_tiles(run: Run) -> list[Markup]:
    tiles = []
    if run.slices:
        part = run.slices[0]
        about = f"evaluation, {shown(number(part, 'prompts'))} prompts"
        tiles.append(tile("τ, decoded", shown(run.evaluated_tau, ".2f"), about))
        tiles.append(tile("speed-up", shown(number(part, "speed_up"), ".2f", "×"), "against the target alone"))
    if check := decode_check(run):
        verdict = "paths disagree" if check.get("flagged") else "both paths agree"
        tiles.append(tile("τ, decode check", shown(number(check, "tau_decoded"), ".2f"), verdict))
    return tiles


def _trouble_tiles(run: Run) -> list[Markup]:
    pairs = (("skipped updates", skipped(run)), ("restarts", run.restarts))
    return [tile(label, f"{times:,}", "see Interruptions") for label, times in pairs if times]


def _curves(runs: Sequence[Run]) -> Markup:
    alone = len(runs) == 1
    if not any(run.rows for run in runs):
        return note("No line of metrics.jsonl yet.")
    about = "Running means over a twentieth of the lines" + (
        "; faint: each line. Dotted verticals: training began again, after a stop or from a checkpoint."
        if alone
        else "."
    )
    if not all(run.spans for run in runs if run.rows):
        about += " Time is counted from each start's first line on, as there is no events.jsonl to say more."
    return join(note(about), curve_cards(runs))


# --- several runs


def _final_numbers(runs: Sequence[Run]) -> Markup:
    headings = [
        "run", "state", "step", "loss", "τ", "accuracy", "context tokens/s", "time in training",
        "context tokens", "τ, decoded", "speed\u2011up", "identical", "skipped", "restarts",
    ]  # fmt: skip
    rows = [[join(swatch(color(n)), run.label), run.state, *_final_row(run)] for n, run in enumerate(runs)]
    about = note(
        "Loss, τ (teacher-forced) and accuracy: means over the last twentieth of each run's lines. Tokens/s: median "
        "since the last start. τ decoded, speed-up and identical answers are of `draftmill evaluate`."
    )
    return join(about, table(headings, rows, words=2))


def _final_row(run: Run) -> list[str]:
    part = run.slices[0] if run.slices else {}
    return [
        f"{shown(run.step)} of {shown(run.total_steps)}",
        shown(run.last_twentieth("loss"), ".3f"),
        shown(run.last_twentieth("tau_teacher_forced"), ".2f"),
        percent(run.last_twentieth("accuracy")),
        shown(run.steady_tokens_per_second()[0]),
        span(run.training_seconds),
        shown(run.last("context_tokens")),
        shown(run.evaluated_tau, ".2f"),
        shown(number(part, "speed_up"), ".2f", "×"),
        identical(part),
        f"{skipped(run):,}",
        f"{run.restarts:,}",
    ]


def _differences(runs: Sequence[Run]) -> Markup:
    """Keys of the configs, and of what the runs were made with, that are not the same in all."""
    configs = [{k: v for k, v in run.config.items() if k != "run_dir"} for run in runs]
    differing = _differing(configs, "config.yaml")
    known = {"command", *(_leaf(row[1]) for row in differing)}  # run.json repeats some of the config
    records = [{k: v for k, v in flat(run.record).items() if _leaf(k) not in known} for run in runs]
    differing += _differing(records, "run.json")
    if not differing:
        return note("Nothing: the configs and run.json have the same values.")
    return table(["file", "key", *[run.label for run in runs]], differing, words=2 + len(runs))


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _differing(tables: Sequence[dict[str, Any]], file: str) -> list[list[str]]:
    keys = list(dict.fromkeys(key for values in tables for key in values))
    found = []
    for key in keys:
        cells = [plain(values[key]) if key in values else NONE for values in tables]
        if len(set(cells)) > 1:
            found.append([file, key, *["left out" if cell == "null" else cell for cell in cells]])
    return found


def _footer(runs: Sequence[Run]) -> Markup:
    return note(
        f"Read from the files at {moment(runs[0].now)} by draftmill {__version__}. Loss: mean of −log q over drafted "
        "slots, early ones weigh more. τ, teacher-forced: right guesses in a row plus one, mean over training blocks; "
        "decoded: tokens per pass of the target on the prompts of the evaluation."
    )
