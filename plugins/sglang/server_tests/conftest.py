"""Fixtures of the tests on real servers, which need CORE_RL_SGLANG_PYTHON, which ``nox -s sglang`` sets."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from server_stub import ADAPTERS, initialized
from sglang_support import API_KEY, build, tiny_model

from core_rl.engine.inference import InferenceEngine


def pytest_collection_modifyitems() -> None:
    """A missing environment is an error and no reason to skip."""
    if not os.environ.get("CORE_RL_SGLANG_PYTHON"):
        raise pytest.UsageError("set CORE_RL_SGLANG_PYTHON to the Python of an environment with SGLang")


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of tiny models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def adapted(root: Path) -> Iterator[InferenceEngine]:
    """One server that takes adapters."""
    with initialized(build(tiny_model(root), lora=ADAPTERS, api_key=API_KEY)) as engine:
        yield engine


@pytest.fixture(scope="session")
def engine(root: Path) -> Iterator[InferenceEngine]:
    """One server for all tests that accept the weights that others have left."""
    with initialized(build(tiny_model(root), api_key=API_KEY)) as engine:
        yield engine
