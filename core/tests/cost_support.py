"""Counters of work: costs are compared by counts, which do not depend on the machine."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def elements(result: Any) -> int:
    """Elements of tensors and entries of lists in the result of a call."""
    if isinstance(result, Tensor):
        return result.numel()
    return sum(max(1, elements(item)) for item in result) if isinstance(result, tuple | list) else 0


class CountedOperations(TorchDispatchMode):
    """Elements of the results of all operations inside the context, a backward pass included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements += elements(result)
        return result


class CountedCalls(TorchFunctionMode):
    """Elements of the results of functions of torch inside the context, lists of results included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements += elements(result)
        return result


class Comparable(int):
    """A number that counts the comparisons with any of its kind."""

    comparisons = 0

    def __lt__(self, second: int) -> bool:
        Comparable.comparisons += 1
        return int(self) < int(second)

    def __le__(self, second: int) -> bool:
        Comparable.comparisons += 1
        return int(self) <= int(second)

    def __gt__(self, second: int) -> bool:
        Comparable.comparisons += 1
        return int(self) > int(second)

    def __ge__(self, second: int) -> bool:
        Comparable.comparisons += 1
        return int(self) >= int(second)
