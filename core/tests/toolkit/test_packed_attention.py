"""Packed attention: the cost of its backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cost_support import CountedOperations
from torch import nn

from core_rl.toolkit.attention import packed_attention
from core_rl.toolkit.segments import Segments

TOKENS = 256


def _elements_of_step(length: int, settings: dict[str, Any]) -> int:
    """Elements that a forward and a backward pass over segments of ``length`` tokens computes."""
    query, key, value = (torch.randn(1, heads, TOKENS, 64, requires_grad=True) for heads in (4, 2, 2))
    segments = Segments(tuple(range(0, TOKENS + 1, length)))
    operations = CountedOperations()
    with operations:
        out, _ = packed_attention(nn.Module(), query, key, value, None, segments=segments, **settings)
        out.sum().backward()
    return operations.elements


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 2}, {"softcap": 20.0}])
def test_backward_memory_is_independent_of_segments(settings: dict[str, Any]) -> None:
    assert _elements_of_step(4, settings) < 1.5 * _elements_of_step(32, settings)
