"""The docs say what the code does: the generated page is fresh, links lead somewhere, commands are accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import cast
from urllib.parse import unquote

import pytest
import typer
import yaml

from draftmill.cli import app
from draftmill.config import RunConfig, known_keys
from draftmill.run.reference import reference

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMANDS = typer.main.get_command(app)
USAGE_ERROR = cast(type[Exception], typer.BadParameter.__mro__[1])  # recent typer brings its own click


def fences(page: Path, *languages: str) -> list[str]:
    return [text for language, text in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def commands(page: Path) -> list[list[str]]:
    """Words behind `draftmill` of every command in the page's code blocks."""
    joined = "\n".join(fences(page, "", "sh", "bash", "console")).replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in joined.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("draftmill ")]


def fault(words: list[str]) -> str | None:
    """What is wrong with a command, or None. Arguments are parsed but nothing runs, and files need not exist."""
    known = COMMANDS.commands  # type: ignore[attr-defined]
    if words[0] not in known:
        return f"there is no command {words[0]}"
    try:
        context = known[words[0]].make_context(words[0], words[1:])
    except USAGE_ERROR as error:
        return str(error)
    keys = [word.partition("=")[0] for word in context.params.get("overrides") or []]
    unknown = sorted(set(keys) - set(known_keys(RunConfig)))
    return f"unknown keys {unknown}" if unknown else None


def test_configuration_page_is_the_generated_one() -> None:
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == reference(), "run `make docs`"


def test_every_key_is_in_the_configuration_page() -> None:
    text = reference()
    assert [key for key in known_keys(RunConfig) if f"| `{key}` |" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]
    paths = [unquote(target.partition("#")[0]) for target in targets]
    assert [path for path in paths if path and not (page.parent / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_accepted(page: Path) -> None:
    faults = {" ".join(words): fault(words) for words in commands(page)}
    assert {command: why for command, why in faults.items() if why} == {}


def test_commands_are_found_and_faults_are_seen() -> None:
    assert len(commands(ROOT / "README.md")) >= 7
    assert fault(["train", "run.yaml", "train.lr=1e-3", "--resume"]) is None
    assert "rate" in str(fault(["train", "run.yaml", "train.rate=1"]))
    assert "--fast" in str(fault(["train", "run.yaml", "--fast"]))
    assert "prompts" in str(fault(["evaluate", "runs/mine"]))
    assert "tune" in str(fault(["tune"]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_example_configs_are_valid(page: Path) -> None:
    for text in fences(page, "yaml"):
        config = RunConfig.model_validate(yaml.safe_load(text))
        assert config.run_dir.parts[0] == "runs"


def test_example_configs_are_found() -> None:
    assert any(fences(page, "yaml") for page in PAGES)


def test_the_file_tree_of_the_readme_names_every_module() -> None:
    tree = next(text for text in fences(ROOT / "README.md", "") if "cli.py" in text)
    package = ROOT / "src" / "draftmill"
    modules = {path.name for path in package.rglob("*.py")} - {"__init__.py", "__main__.py", "config.py"}
    assert sorted(name for name in modules if not re.search(rf"\b{re.escape(name)}", tree)) == []
