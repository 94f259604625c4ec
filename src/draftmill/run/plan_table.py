"""A plan on the terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftmill.run.plan import Plan
from draftmill.run.plan_estimate import GpuMemory, Split
from draftmill.run.words import duration

Rows = list[tuple[str, str]]


def print_plan(plan: Plan, console: Console) -> None:
    """What runs where, how long it takes, what it needs; then what cannot work and what all of it rests on."""
    _print_rows("run", _run(plan), console)
    if len(plan.options) > 1:
        console.print(_options(plan))
    _print_rows("time", _time(plan), console)
    if plan.memory:
        _print_rows("memory of a GPU", [_memory(gpu) for gpu in plan.memory], console)
    _print_rows("host and disk", _room(plan), console)
    for title, lines in (("assumptions", plan.assumptions), ("notes", plan.notes), ("cannot work", plan.problems)):
        if lines:
            _print_rows(title, [("–", line) for line in lines], console)


def _print_rows(title: str, rows: Rows, console: Console) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def _run(plan: Plan) -> Rows:
    device, data, drafter, target = plan.device, plan.data, plan.drafter, plan.target
    schedule, seconds = plan.schedule, plan.seconds
    return [
        (
            "devices",
            f"{device['gpus']} × {device['name']}: {plan.chosen.describe()}; seconds "
            + ("are estimates" if device["measured_on"] is None else f"measured on {device['measured_on']}"),
        ),
        (
            "data",
            f"{data['documents']:,} documents, {data['tokens']:,} tokens; {data['batches_per_epoch']:,} batches of "
            f"{data['token_budget']:,} an epoch, {data['padding_share']:.1%} padding, {data['cut_documents']:,} cut, "
            f"{data['left_out_documents']:,} left out",
        ),
        (
            "schedule",
            f"{schedule['steps']:,} steps of {schedule['accumulation']} × {schedule['anchors']:,} anchors",
        ),
        (
            "target",
            f"{target['parameters'] / 1e9:.2f} B parameters, {target['active_parameters'] / 1e9:.2f} B a token in "
            f"{target['layers_run']} layers; {_seconds(seconds['target_batch'])} a batch",
        ),
        (
            "drafter",
            f"{drafter['parameters'] / 1e6:.1f} M parameters, {drafter['layers']} layers, step {drafter['step']}; "
            f"{_seconds(seconds['drafter_batch'])} a batch: step {_seconds(seconds['drafter_step'])}, and a share "
            f"of the update ({_seconds(seconds['update'])}) and of summing gradients "
            f"({_seconds(seconds['gradient_sum'])}), once an optimizer step",
        ),
    ]


def _options(plan: Plan) -> Table:
    """One row a split."""
    title = f"ways to use {plan.device['gpus']} GPUs"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("tok/s", "bound by", "idle", "fits"):
        table.add_column(heading, justify="right")
    for one in plan.options:
        table.add_row(*_option(one), style="bold" if one == plan.chosen else "")
    return table


def _option(one: Split) -> tuple[str, ...]:
    return (
        one.describe(),
        f"{one.tokens_per_second:,.0f}",
        one.bound,
        str(one.idle),
        "yes" if one.fits else "no",
    )


def _time(plan: Plan) -> Rows:
    time, waits = plan.time, plan.waits
    shares = [f"{side.removesuffix('_wait')} wait {share:.0%}" for side, share in waits.items() if share is not None]
    rows = [
        (
            "speed",
            f"{time['tokens_per_second']:,.0f} context tokens/s, bound by {'; '.join([plan.chosen.bound, *shares])}",
        ),
        ("an epoch", _hours(time["first_epoch_hours"])),
    ]
    if time["later_epoch_hours"] < time["first_epoch_hours"]:
        later = f"{_hours(time['later_epoch_hours'])}, {time['later_tokens_per_second']:,.0f} tokens/s: states are kept"
        rows.append(("a later one", later))
    unit = "GPU-hours" if plan.memory else "hours of processes"
    rows.append(("in total", f"{_hours(time['total_hours'])} = {time['gpu_hours']:,.2f} {unit}"))
    if plan.memory:
        first = plan.warm_up
        words = (
            f"not in there; measured on an h200: {first['nothing_compiled']:.0f} s at the 27B shape, "
            f"{first['some_compiled']:.0f} s with some kernels compiled before; {first['small_shape']:.0f} s, SmolLM2"
        )
        rows.append(("first step", words))
    return rows


def _memory(gpu: GpuMemory) -> tuple[str, str]:
    parts = " + ".join(f"{name} {size(number)}" for name, number in gpu.parts.items())
    groups = f", blocks in {gpu.groups} groups" if gpu.groups and gpu.groups > 1 else ""
    full = "" if gpu.fits else "; DOES NOT FIT"
    return gpu.role, f"{size(gpu.total_bytes)} of {size(gpu.limit_bytes)}{groups}{full} = {parts}"


def _room(plan: Plan) -> Rows:
    host, disk, queue = plan.host, plan.disk, plan.queue
    rows = [
        (
            "host memory",
            f"slots {size(host['slots'])}, embedding and head {size(host['matrices'])}; "
            f"up to {size(host['loading'])} while targets load",
        )
    ]
    if queue is not None:
        rows.append(("queue", _queue(queue)))
    rows.append(
        (
            "checkpoints",
            f"{disk['checkpoints']} × {size(disk['checkpoint_bytes'])}; "
            f"up to {size(disk['while_saving_bytes'])} while one is written",
        )
    )
    if disk["cache_share"]:
        rows.append(("cache", f"{size(disk['cache_bytes'])} for {disk['cache_share']:.0%} of an epoch's batches"))
    return rows


def _queue(queue: dict[str, Any]) -> str:
    return (
        f"{queue['gb_per_second']:.2f} GB/s of hidden states, {queue['gb_per_second_each_drafter']:.2f} into each "
        f"drafter GPU over a link of {queue['link_gb_per_second']:g}; {queue['slots_per_rank']} slots of "
        f"{size(queue['slot_bytes'])} a rank in {queue['where']} memory"
    )


def size(number: float) -> str:
    """52.1 GB, or MB where there are fewer than 100."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.1f} MB"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _hours(hours: float) -> str:
    return duration(hours * 3600)
