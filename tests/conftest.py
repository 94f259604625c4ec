"""Fixtures for all tests. `make test` runs two processes of one thread each, so that they don't fight over cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parent.parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real SmolLM2-135M-Instruct, fetched once into the checkout's cache."""
    if given := os.environ.get("DRAFTMILL_TEST_TARGET"):
        return Path(given)
    folder = ROOT / "models" / "smollm2-135m"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):  # several test processes may ask at once
        if not (folder / "config.json").exists():
            script = ROOT / "examples" / "quickstart" / "fetch_target.py"
            subprocess.run([sys.executable, str(script), str(folder)], check=True)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets beside the checkout; tests that use them skip without."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no real data sets beside the checkout")
    return folder
