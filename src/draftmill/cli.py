"""The commands. Nothing heavy is imported before a command runs, so that --help answers at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from draftmill import __version__, cli_runs
from draftmill.errors import UserError

app = typer.Typer(
    help="Train DFlash drafters: small block-diffusion models that let a large language model decode several tokens "
    "per forward pass without changing its output.\n\n"
    "prepare → train → evaluate → export. Start with `make quickstart`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Inputs = Annotated[list[Path], typer.Argument(help="Conversations: .jsonl, .jsonl.gz, .jsonl.zst or .parquet.")]
Model = Annotated[str, typer.Option(help="Folder or hub id of the target.")]
TemplateArguments = Annotated[
    list[str] | None,
    typer.Option("--template", metavar="KEY=VALUE", help="Argument for the chat template; as in serving. Repeatable."),
]
RunPath = Annotated[Path, typer.Argument(help="Folder of a run, or of one of its checkpoints.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def prepare(
    inputs: Inputs,
    model: Model,
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("prepared"),
    template: TemplateArguments = None,
    turns: Annotated[str, typer.Option(help="Which assistant turns are trained: all or last.")] = "all",
    max_tokens: Annotated[int | None, typer.Option(help="Cut longer documents at this many tokens.")] = None,
    mask_token_id: Annotated[int | None, typer.Option(help="Drop rows whose text holds this token.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes. Default: one per core.")] = None,
    preview: Annotated[int, typer.Option(help="Show this many rows, trained tokens highlighted; write nothing.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a prepared set in OUTPUT.")] = False,
) -> None:
    """Turn conversations into a prepared data set: tokens and which of them are trained.

    Rows that cannot be used are listed in OUTPUT/dropped.jsonl with file, row and reason.
    """
    from draftmill.data.config import PrepareConfig
    from draftmill.data.prepare import prepare as run
    from draftmill.data.preview import preview as show
    from draftmill.data.preview import print_preview

    values = {
        "inputs": inputs,
        "output": output,
        "model": model,
        "template_kwargs": _template(template),
        "turns": turns,
        "max_tokens": max_tokens,
        "mask_token_id": mask_token_id,
    }
    config = _validated(PrepareConfig, values | ({} if workers is None else {"workers": workers}))
    if preview:
        print_preview(show(config, preview))
        return
    print("\n".join(run(config, overwrite=overwrite).lines()))


@app.command()
def regenerate(
    inputs: Annotated[list[Path], typer.Argument(help="Conversations or prompts, in the formats of prepare.")],
    model: Model,
    output: Annotated[Path, typer.Option(help="JSON Lines file to write; an interrupted job goes on where it was.")],
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer; a cut one is marked unfinished.")] = 512,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Conversations answered at once.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the draws at a temperature above 0.")] = 0,
    template: TemplateArguments = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Device = "auto",
) -> None:
    """Have the target itself answer the user turns: the on-policy data that a drafter should learn from."""
    from draftmill.run.regenerate import RegenerateConfig
    from draftmill.run.regenerate import regenerate as run

    values = {
        "inputs": inputs,
        "output": output,
        "model": model,
        "dtype": dtype,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "batch_size": batch_size,
        "seed": seed,
        "template_kwargs": _template(template),
    }
    with _Line() as line:
        done = run(
            _validated(RegenerateConfig, values),
            device=_device(device),
            progress=lambda answered, rows, tokens: line.show(f"answered {answered}/{rows}, {tokens:,} new tokens"),
        )
    rate = done.tokens / max(done.seconds, 1e-9)
    print(
        f"rows {done.rows:,} = answered {done.answered:,} ({done.resumed:,} before) + dropped {done.dropped:,}; "
        f"{done.unfinished:,} cut at {max_new_tokens} tokens; {done.tokens:,} new tokens, {rate:,.0f} a second"
    )


@app.command()
def plan(
    config: Annotated[Path, typer.Argument(help="Run config, YAML.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As for train.")] = None,
    device: Annotated[str, typer.Option(help="h200, b200, h100, a100-80, a100-40 or rtx4090.")] = "h200",
    gpus: Annotated[int | None, typer.Option(help="How many. Default: those that devices names, or one.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure both sides on this machine's first GPU, or its CPU.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """What a run would cost, before it starts and without a GPU: time, memory, disk, and what bounds it.

    Estimated or measured: what the numbers rest on is printed. Exit code 1: the run would not work, and why.
    """
    from rich.console import Console

    from draftmill.config import load_run_config
    from draftmill.run.plan import make_plan
    from draftmill.run.plan_table import print_plan

    made = make_plan(load_run_config(config, overrides or []), device, gpus, measured=measure)
    if as_json:
        print(json.dumps(made.to_dict()))
    else:
        print_plan(made, Console())
    raise typer.Exit(1 if made.problems else 0)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="Run config, YAML. Left out: only this machine.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As for train.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts: a list of findings.")] = False,
) -> None:
    """What is well and what is not, before anything is spent: this machine and, given a config, all of a run.

    Changes nothing and loads no weights. Exit code 2 if there is an error; warnings do not count.
    """
    from draftmill.run.doctor import doctor as run

    raise typer.Exit(run(config, overrides or [], as_json=as_json))


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="Run config, YAML.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="E.g. train.lr=3e-4")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last complete checkpoint.")] = False,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="The whole way with two steps: load, train, save, decode, export.")
    ] = False,
) -> None:
    """Train a drafter. Ctrl-C saves and stops; --resume goes on exactly where it was.

    The resolved config is printed and stored in the run folder. docs/configuration.md lists every key.
    A dry run leaves the run folder alone; exit code 1 if one of its stages failed.
    """
    from draftmill.config import load_run_config

    if dry:
        from rich.console import Console

        from draftmill.run.dry_run import dry_run

        if resume:
            raise UserError("--dry-run begins anew, whatever the run folder holds; leave out --resume")
        raise typer.Exit(dry_run(load_run_config(config, overrides or []), Console()))
    from draftmill.run.train import train as run

    raise typer.Exit(run(load_run_config(config, overrides or []), resume=resume))


@app.command()
def evaluate(
    run: RunPath,
    prompts: Annotated[Path, typer.Option(help="JSON Lines with messages, conversations or prompt; source = slice.")],
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    limit: Annotated[int | None, typer.Option(help="Use only the first so many prompts.")] = None,
    temperature: Annotated[float, typer.Option(help="0: greedy, compared token for token with the target.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16. auto: float32 on a CPU.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the draws at a temperature above 0.")] = 0,
    target: Annotated[str | None, typer.Option(help="Folder of the target, if it moved since training.")] = None,
    template: TemplateArguments = None,
    device: Device = "auto",
) -> None:
    """Decode prompts for real, with and without the drafter: acceptance, speed, and whether every token is the same.

    Writes evaluation.json and report.png into the run folder. Exits with 1 when a greedy answer differs from the
    target's own by more than rounding.
    """
    from rich.console import Console

    from draftmill.evaluate.config import EvaluateConfig
    from draftmill.evaluate.table import print_table
    from draftmill.run.evaluate import evaluate_run

    values = {
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "limit": limit,
        "temperature": temperature,
        "dtype": dtype,
        "seed": seed,
    }
    with _Line() as line:
        done = evaluate_run(
            run,
            _validated(EvaluateConfig, values),
            target=target,
            template_kwargs=None if template is None else _template(template),
            device=_device(device),
            progress=lambda number, count: line.show(f"decoded {number}/{count} prompts, with and without drafter"),
        )
    print_table(done.result, Console())
    if done.json_path:
        print(f"wrote {done.json_path} and {done.png_path}")
    if any(not mismatch.tie for mismatch in done.result.overall.mismatches):
        raise typer.Exit(1)


@app.command()
def export(
    run: RunPath,
    output: Annotated[Path | None, typer.Option(help="Folder to write. Default: RUN/export.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Reload what was written and compare it with the run.")
    ] = False,
) -> None:
    """Write the drafter in the layout that z-lab's client, vLLM and SGLang load."""
    from draftmill.run.evaluate import check_run_export, export_run

    if dtype not in ("bfloat16", "float16", "float32"):
        raise UserError(f"--dtype {dtype}: choose bfloat16, float16 or float32")
    if output is None and run.exists() and not (run / "status.json").exists():
        raise UserError(f"{run} is not a run folder, so there is no place for the export by default; give --output")
    folder = output or run / "export"
    path, drafter = export_run(run, folder, dtype=dtype, overwrite=overwrite)
    print(f"wrote {path} ({len(drafter.state_dict())} tensors, {dtype})")
    if check:
        report = check_run_export(run, folder)
        referee = "not installed" if report.referee_gap is None else f"largest difference {report.referee_gap:.1e}"
        print(
            f"check: {report.tensors} tensors equal; outputs over {report.context_tokens} context tokens equal; "
            f"z-lab's client: {referee}"
        )


for _command in cli_runs.COMMANDS:
    app.command()(_command)


def main() -> None:
    """Entry point: user errors are one line and exit code 2, bugs keep their traceback."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


class _Line:
    """A live line on a terminal, a line every 30 seconds (and the last one) elsewhere."""

    SECONDS = 30.0

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last = 0.0
        self._text = ""

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._text:
            print(("\r\033[K" if self._live else "") + self._text, file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        import time

        self._text = text
        if self._live:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._last > self.SECONDS:
            self._last = time.monotonic()
            print(text, file=sys.stderr, flush=True)


def _validated(model: Any, values: dict[str, Any]) -> Any:
    from pydantic import ValidationError

    from draftmill.config import explain

    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(explain(error, model)) from None


def _template(pairs: list[str] | None) -> dict[str, Any]:
    import yaml

    result = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--template {pair!r} is not of the form KEY=VALUE, for example enable_thinking=false")
        result[key] = yaml.safe_load(value)
    return result


def _device(name: str) -> str:
    from draftmill.run.build import choose_device

    return choose_device(name)
