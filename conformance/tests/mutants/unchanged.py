"""Slices that a mutant leaves as they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from core_rl.backend.tensors import LocalSlice


@contextmanager
def unchanged(parts: Iterable[LocalSlice]) -> Iterator[None]:
    """Undo at the end of the context every change to ``parts``."""
    before = [(part.tensor, part.tensor.clone()) for part in parts]
    yield
    for tensor, value in before:
        tensor.copy_(value)
