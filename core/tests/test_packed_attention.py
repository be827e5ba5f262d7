"""Packed attention: the cost of its backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from core_rl.toolkit.attention import Segments, packed_attention

TOKENS = 256


class CountedElements(TorchDispatchMode):
    """Counts the elements of the results of all operations inside the context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else [result]
        self.count += sum(item.numel() for item in results if isinstance(item, Tensor))
        return result


def _elements_of_step(length: int, settings: dict[str, Any]) -> int:
    """Elements that a forward and a backward pass over segments of ``length`` tokens computes."""
    query, key, value = (torch.randn(1, heads, TOKENS, 64, requires_grad=True) for heads in (4, 2, 2))
    segments = Segments(tuple(range(0, TOKENS + 1, length)))
    elements = CountedElements()
    with elements:
        out, _ = packed_attention(nn.Module(), query, key, value, None, segments=segments, **settings)
        out.sum().backward()
    return elements.count


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 2}, {"softcap": 20.0}])
def test_backward_does_not_grow_with_the_number_of_segments(settings: dict[str, Any]) -> None:
    assert _elements_of_step(4, settings) < 1.5 * _elements_of_step(32, settings)
