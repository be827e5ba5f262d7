"""Fixtures of most test modules: inputs of a run, and one thread for its engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import training_support as support


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what `training_support.make_start` writes; a module that needs more overrides it."""
    return support.make_start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For a tiny model, more threads next to other workers' only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
