"""Who may import whom: the folders' order is the flow's order, and nobody reaches back."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "draftmill"

# folder → what it may import of the package, beside itself. A module allows the modules in it.
ALLOWED: dict[str, set[str]] = {
    "records": set(),
    "errors": set(),
    "drafter": set(),
    "data": {"records", "errors"},
    "handoff": {"records", "errors"},
    "target": {"records", "errors"},
    "train": {"records", "errors", "drafter", "handoff.interface"},
    # prompts are conversations, read and checked by the rules that prepare uses
    "evaluate": {"records", "errors", "drafter", "target.model", "data.read", "data.rules"},
    "export": {"errors", "drafter"},
    "config": {"errors", "data.config", "drafter.config", "handoff.config", "target.config", "train.config"},
}
FREE = {"run", "cli", "cli_runs", "__main__", "__init__"}  # these wire everything
MAY_IMPORT_RUN = {"run", "cli", "cli_runs"}


def imported(tree: ast.AST, own: str) -> Iterator[str]:
    """Dotted names below draftmill that a module imports, at its top or inside functions. `own`: its package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = own.split(".")[: len(own.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("draftmill.") for name in names if name.startswith("draftmill."))


def edges() -> Iterator[tuple[str, str, str]]:
    """(file, its folder or module, imported name) for every import within the package."""
    for path in sorted(SOURCE.rglob("*.py")):
        inside = path.relative_to(SOURCE)
        top = inside.parts[0].removesuffix(".py")
        own = ".".join(("draftmill", *inside.parts[:-1]))
        for name in imported(ast.parse(path.read_text()), own):
            yield str(inside), top, name


def may(top: str, name: str) -> bool:
    parts = name.split(".")
    prefixes = {".".join(parts[: i + 1]) for i in range(len(parts))}
    if parts[0] == "run":
        return top in MAY_IMPORT_RUN
    return top in FREE or parts[0] == top or bool(prefixes & ALLOWED[top])


def test_imports_keep_to_their_direction() -> None:
    found = list(edges())
    wrong = [f"{path} imports draftmill.{name}" for path, top, name in found if not may(top, name)]
    assert not wrong, "\n".join(wrong)
    assert len(found) > 100, "the walk finds nothing"


def test_every_folder_has_a_rule() -> None:
    tops = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert tops - {"__pycache__", "py.typed"} == ALLOWED.keys() | FREE


@pytest.mark.parametrize(
    ("top", "line"),
    [
        ("target", "from draftmill.train.step import micro_step"),
        ("train", "import draftmill.target.capture"),
        ("train", "from draftmill.handoff.memory import MemoryHandoff"),
        ("train", "from draftmill.handoff import memory"),
        ("drafter", "from draftmill.records import TokenBatch"),
        ("drafter", "from draftmill import errors"),
        ("data", "def f():\n    from draftmill.target import shape"),
        ("handoff", "from draftmill.data.plan import BatchPlan"),
        ("handoff", "from ..data import plan"),
        ("evaluate", "from draftmill.target.capture import Target"),
        ("export", "from draftmill.train.checkpoint import Checkpoint"),
        ("config", "from draftmill.run.files import RunFolder"),
        ("evaluate", "from draftmill.run import files"),
    ],
)
def test_a_wrong_import_would_be_found(top: str, line: str) -> None:
    names = list(imported(ast.parse(line), f"draftmill.{top}"))
    assert len(names) == 1
    assert not may(top, names[0])


@pytest.mark.parametrize(
    ("top", "line"),
    [
        ("train", "from draftmill.handoff.interface import BatchSource"),
        ("handoff", "from draftmill.records import HiddenBatch"),
        ("target", "from . import isolation"),
        ("cli", "from draftmill.run.train import train"),
    ],
)
def test_a_right_import_is_let_through(top: str, line: str) -> None:
    (name,) = imported(ast.parse(line), f"draftmill.{top}")
    assert may(top, name)


HEAVY = ("torch", "transformers", "numpy", "pyarrow", "safetensors", "tensorboard", "matplotlib")


def modules_after(statement: str) -> set[str]:
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    return set(json.loads(out))


def test_the_command_line_imports_nothing_heavy() -> None:
    loaded = modules_after("import draftmill.cli")
    assert "draftmill.cli" in loaded
    assert not loaded & set(HEAVY)
    own = {name.split(".")[1] for name in loaded if name.startswith("draftmill.")}
    assert own == {"cli", "cli_runs", "errors"}
