"""Guard of all tests of the core: a process group that a module leaves behind would fail later modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_process_group_is_left() -> Iterator[None]:
    yield
    torch = sys.modules.get("torch")
    assert torch is None or not torch.distributed.is_initialized(), "a test left an engine; destroy it"
