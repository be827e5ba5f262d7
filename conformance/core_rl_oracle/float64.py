"""True float64: promote the upcasts to float32 that models hard-code, and refuse any that is left.

``model.double()`` alone is not float64. RMSNorm, rotary embeddings, softmax and routers of Hugging
Face models compute in float32 whatever the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REDUCED = frozenset({torch.float32, torch.float16, torch.bfloat16})
CASTS = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})


class PrecisionError(Exception):
    """An operation inside the oracle produced less than float64."""


class _Promote(TorchFunctionMode):
    """Reads every request for a smaller floating dtype as one for float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in CASTS:
            return args[0].double()
        keywords = {name: _promoted(value) for name, value in kwargs.items()} if kwargs else {}
        return func(*map(_promoted, args), **keywords)


class _Refuse(TorchDispatchMode):
    """Raises `PrecisionError` for an operation whose result is a smaller floating tensor."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype in REDUCED:
                raise PrecisionError(f"{func} gave {leaf.dtype} inside the float64 oracle")
        return result


def _promoted(value: Any) -> Any:
    return torch.float64 if type(value) is torch.dtype and value in REDUCED else value


@contextmanager
def float64_only(*, refuse: bool = True) -> Iterator[None]:
    """Everything inside runs in float64; what cannot raises `PrecisionError`.

    Looking at the result of each operation takes as long as the operations of tiny models do. Without ``refuse``
    operations are not inspected: for repeats of inspected work.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Promote(), _Refuse() if refuse else nullcontext():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)
