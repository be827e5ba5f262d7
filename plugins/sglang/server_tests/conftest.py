"""What the tests on real servers share. They need CORE_RL_SGLANG_PYTHON, which ``nox -s sglang`` sets."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def pytest_collection_modifyitems() -> None:
    """A missing environment is an error and no reason to skip."""
    if not os.environ.get("CORE_RL_SGLANG_PYTHON"):
        raise pytest.UsageError("set CORE_RL_SGLANG_PYTHON to the Python of an environment with SGLang")
