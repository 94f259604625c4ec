from __future__ import annotations

from pathlib import Path

import pytest
from target_models import ARCHITECTURES, plain_model, save
from torch import nn

from draftmill.target.capture import Target
from draftmill.target.config import TargetConfig

TAPS = (1, 14, 28)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One saved tiny target per architecture."""
    return {name: save(tmp_path_factory.mktemp(name), name) for name in ARCHITECTURES}


@pytest.fixture(scope="session")
def real(smollm2: Path) -> Target:
    """SmolLM2 in bfloat16, tapped at layers 1, 14 and 28 of 30."""
    return Target(TargetConfig(model=str(smollm2)), TAPS)


@pytest.fixture(scope="session")
def real_plain(smollm2: Path) -> nn.Module:
    return plain_model(smollm2, "bfloat16")
