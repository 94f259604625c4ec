"""What the report tells of one run beside its curves: evaluation, time, interruptions, origin."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from draftmill.run.report_files import Run, flat, mean, number, whole
from draftmill.run.report_html import NONE, Markup, count, fold, join, moment, note, percent, plain, shown, table, tag
from draftmill.run.report_panels import color, column, swatch
from draftmill.run.words import duration

NEWEST = 50  # warnings and events, shown
EVENTS = ("stalled", "moving", "restart", "recompiled", "skipped", "rewound")  # beside phases and checkpoints

PHASES = {  # what to call it, and the number of its colour
    "loading": ("starting and loading", 6),
    "compiling": ("compiling", 1),
    "warming up": ("first batch: warming up", 5),
    "training": ("training", 0),
    "waiting": ("drafters waiting for batches", 3),
    "saving": ("saving checkpoints", 2),
    "checking": ("decode check and closing", 4),
    "between": ("stopped or dead, between two starts", 7),
}


def evaluation(run: Run) -> Markup:
    if not run.slices:
        return join(note("Not evaluated yet: there is no evaluation.json."), _check_line(run))
    values = run.evaluation or {}
    temperature = number(values, "temperature")
    parts = [
        f"checkpoint of step {shown(whole(values, 'step'))}",
        f"prompts {values['prompts_file']}" if values.get("prompts_file") else "",
        "greedy" if temperature == 0 else f"temperature {shown(temperature, 'g')}",
        str(values.get("dtype") or ""),
        f"at most {shown(whole(values, 'max_new_tokens'))} new tokens",
    ]
    headings = ["slice", "τ", "speed\u2011up", "identical", "prompts", "tokens", "tokens/s", "target alone"]
    rows = [_slice_row(part) for part in (run.slices if len(run.slices) > 2 else run.slices[:1])]
    newest = run.checkpoints[-1][0] if run.checkpoints else None
    old = newest is not None and newest != whole(values, "step")
    return join(
        note("; ".join(part for part in parts if part) + "."),
        tag("p", f"There is a newer checkpoint, of step {newest:,}.", class_="bad") if old else "",
        _lossless(run.slices[0]),
        table(headings, rows),
        _check_line(run),
    )


def slices_compared(runs: Sequence[Run]) -> Markup:
    """Decoded τ of each slice. Slices of one name may be of other prompts, so the files are named too."""
    taus = [{plain(part.get("name")): slice_tau(part) for part in run.slices} for run in runs]
    names = list(dict.fromkeys(name for own in taus for name in own))
    if not names:
        return note("None of them is evaluated yet.")
    rows: list[list[Any]] = [[name, *[shown(own.get(name), ".2f") for own in taus]] for name in names]
    files = [plain((run.evaluation or {}).get("prompts_file") or NONE) for run in runs]
    return join(note("τ, decoded."), table(["slice", *[run.label for run in runs]], [*rows, ["prompts", *files]]))


def slice_tau(part: Any) -> float | None:
    acceptance = part.get("acceptance")
    return number(acceptance, "tau") if isinstance(acceptance, dict) else None


def _slice_row(part: Any) -> list[str]:
    tau = slice_tau(part)
    rates = [shown(number(part, key), ",.1f") for key in ("tokens_per_second", "plain_tokens_per_second")]
    counts = [shown(number(part, key)) for key in ("prompts", "tokens")]
    speed_up = shown(number(part, "speed_up"), ".2f", "×")
    return [plain(part.get("name")), shown(tau, ".2f"), speed_up, identical(part), *counts, *rates]


def identical(part: Any) -> str:
    if not part:
        return NONE
    same = number(part, "identical")
    return "sampled" if same is None else f"{same:,.0f}/{shown(number(part, 'prompts'))}"


def _lossless(part: Any) -> Markup:
    """Whether the drafter changed an answer."""
    same, prompts = number(part, "identical"), number(part, "prompts")
    if same is None:
        return note("Answers were sampled, so they were not compared with the target's own.")
    if same == prompts:
        return tag("p", f"Lossless: all {same:,.0f} answers equal the target's own, token for token.", class_="good")
    listed = part.get("mismatches")
    found = [bool(m.get("tie")) for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
    ties, faults = sum(found), len(found) - sum(found)
    text = f"{same:,.0f} of {shown(prompts)} answers equal the target's own. Of the others, rounding explains {ties:,}"
    return tag("p", f"{text} (ties) and does not explain {faults:,}.", class_="bad" if faults else "soft")


def decode_check(run: Run) -> dict[str, Any] | None:
    check = run.status.get("decode_check")
    return check if isinstance(check, dict) else None


def _check_line(run: Run) -> Markup | str:
    if not (check := decode_check(run)):
        return ""
    decoded, training = (shown(number(check, key), ".2f") for key in ("tau_decoded", "tau_training"))
    blocks = shown(number(check, "blocks"))
    agree = percent(number(check, "blocks_agree"))
    text = f"Decode check: τ {decoded} decoded, {training} by the training path on the same {blocks} blocks"
    flagged = bool(check.get("flagged"))
    end = " Decoding and training disagree: served acceptance will differ." if flagged else ""
    return tag("p", f"{text}; {agree} of blocks agree.{end}", class_="bad" if flagged else "note")


def time_spent(run: Run) -> Markup:
    if not run.spans:
        return join(note("Unknown: there is no events.jsonl that says when the run was in which phase."), _waits(run))
    parts = run.budget
    total = sum(seconds for _, seconds in parts) or 1.0
    rows: list[list[Any]] = [[_phase(what), span(seconds), percent(seconds / total)] for what, seconds in parts]
    rows.append([tag("b", "together"), span(total), ""])
    about = note(
        f"From {moment(run.spans[0].start)} on, by events.jsonl. A process that was killed counts as training until "
        "its last line in any file. What came before the first line of events.jsonl is unknown."
    )
    shares = table(["", "time", "share"], rows)
    return join(about, budget_bar(parts), shares, _waits(run), _by_process(run))


def budget_bar(parts: Sequence[tuple[str, float]]) -> Markup:
    """Shares of the whole, side by side."""
    total = sum(seconds for _, seconds in parts) or 1.0
    bars = [
        tag("div", style=f"width: {100 * seconds / total:.2f}%; background: var(--c{PHASES[what][1]})")
        for what, seconds in parts
    ]
    return tag("div", *bars, class_="budget")


def times_compared(runs: Sequence[Run]) -> Markup:
    """Where the time of several runs went."""
    known = [(number, run, dict(run.budget)) for number, run in enumerate(runs) if run.spans]
    if not known:
        return note("Unknown: none of them has an events.jsonl that says when it was in which phase.")
    phases = [phase for phase in PHASES if any(phase in times for _, _, times in known)]
    bars = [
        join(tag("p", join(swatch(color(number)), run.label)), budget_bar(list(times.items())))
        for number, run, times in known
    ]
    rows = [[_phase(phase), *[span(times.get(phase)) for _, _, times in known]] for phase in phases]
    rows.append([tag("b", "together"), *[span(sum(times.values())) for _, _, times in known]])
    return join(*bars, table(["", *[run.label for _, run, _ in known]], rows))


def _by_process(run: Run) -> Markup | str:
    """Only what is told of each process: in steady state it is working, whatever it waits for."""
    times: dict[str, dict[str, float]] = {}
    for name, spans in run.by_process.items():
        own = times.setdefault(name, defaultdict(float))
        for one in spans:
            own[one.phase] += one.seconds
    if not times:
        return ""
    phases = list(dict.fromkeys(phase for own in times.values() for phase in own))
    rows = [[name, *[span(own[phase]) if phase in own else NONE for phase in phases]] for name, own in times.items()]
    about = note("By events.jsonl, which has no waits of less than two seconds: they are in “working”.")
    return fold("By process", about, table(["process", *phases], rows))


def _phase(phase: str) -> Markup:
    name, number = PHASES[phase]
    return join(swatch(color(number)), name)


def _waits(run: Run) -> Markup | str:
    sides = (("targets", "waits.targets_wait"), ("drafters", "waits.drafters_wait"))
    known = [(side, share) for side, key in sides if (share := mean(column(run, key))) is not None]
    if not known:
        return ""
    return note("Waiting, mean of all lines: " + ", ".join(f"{side} {percent(share)}" for side, share in known) + ".")


def interruptions(run: Run) -> Markup:
    lines = [_skipped_line(run), _restart_line(run), _stall_line(run), *_ledger_lines(run)]
    accumulation = whole(run.config, "train.accumulation")
    rewinds = [
        [moment(t), f"{first // accumulation:,}" if accumulation else f"batch {first:,}", reason]
        for first, reason, t in run.ledger.rewinds
    ]
    others = [
        [moment(number(e, "time")), e.get("kind", ""), e.get("text", "")] for e in run.events if e.get("kind") in EVENTS
    ]
    warnings = [[moment(number(e, "time")), e.get("text", "")] for e in run.events if e.get("kind") == "warning"]
    return join(
        tag("ul", *[tag("li", line) for line in lines if line]),
        table(["drafters started anew", "from step", "reason"], rewinds, words=3) if rewinds else "",
        fold(count(len(others), "event"), table(["when", "kind", "event"], others[-NEWEST:], words=3))
        if others
        else "",
        fold(count(len(warnings), "warning"), table(["when", "warning"], warnings[-NEWEST:], words=2))
        if warnings
        else "",
    )


def skipped(run: Run) -> int:
    return max((round(value) for value in run.column("skipped") if value is not None), default=0)


def _skipped_line(run: Run) -> str:
    counts = [(row["step"], number(row, "skipped")) for row in run.rows]
    if not skipped(run):
        return "No update was skipped."
    rises = [f"{b:,}" for (_, x), (b, y) in zip([(0, 0.0), *counts], counts, strict=False) if (y or 0) > (x or 0)]
    places = ", ".join(rises[:20]) + (" …" if len(rises) > 20 else "")
    total = count(skipped(run), "update")
    return f"{total} skipped for a gradient that was not finite, noted in the lines of steps {places}."


def _restart_line(run: Run) -> str:
    workers = whole(run.status, "restarts")
    again = count(run.restarts, "time")
    text = f"Training began again {again}." if run.restarts else "Training went through in one go."
    return text + (f" Workers started anew since the last start: {workers:,}." if workers else "")


def _stall_line(run: Run) -> str:
    """A stall lasts until its process moves again or is started anew."""
    begun: dict[str, float] = {}
    parts = []
    for event in run.events:
        t, kind, worker = number(event, "time"), event.get("kind"), str(event.get("worker"))
        if t is not None and kind == "stalled":
            begun.setdefault(worker, t)
        elif t is not None and kind in ("moving", "restart") and worker in begun:
            parts.append(f"{worker} for {duration(t - begun.pop(worker))}")
    parts += [f"{worker} for good" for worker in begun]
    return f"Stalled, from the notice until it moved again or was started anew: {', '.join(parts)}." if parts else ""


def _ledger_lines(run: Run) -> list[str]:
    makers = run.ledger.makers
    if not makers:
        return ["No batch in ledger.jsonl."]
    missing = max(makers) + 1 - len(makers)
    repeated = len(run.ledger.repeated)
    sound = not repeated and not missing
    lines = [
        f"{len(makers):,} batches trained, each once."
        if sound
        else f"{len(makers):,} batches trained; {repeated:,} more than once, {missing:,} left out."
    ]
    by_target = Counter(makers.values())
    named = sorted((name, batches) for name, batches in by_target.items() if name)
    if named:
        lines.append("Hidden states by " + ", ".join(f"{name}: {batches:,}" for name, batches in named) + ".")
    return lines


def origin(run: Run) -> Markup:
    config = tag("pre", run.config_text) if run.config_text else note("config.yaml is not there yet.")
    rows = [[key, plain(value)] for key, value in flat(run.record).items()]
    made_with = (
        table(["key", "value"], rows, words=2) if rows else note("run.json is not there yet, or cannot be read.")
    )
    return join(fold("Resolved config", config), fold("Versions, machine, commit", made_with))


def span(seconds: float | None) -> str:
    return NONE if seconds is None else duration(seconds)
