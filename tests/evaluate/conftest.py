import os
from pathlib import Path
import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return Path(os.environ["DRAFTMILL_TEST_TARGET"])
