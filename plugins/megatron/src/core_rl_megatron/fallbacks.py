"""Import Megatron-Core without a warning for each of its modules that falls back to torch.

`core_rl_megatron.backend` imports this first. On each rank there would be a dozen lines, which ask nobody to do
anything: Transformer Engine and Apex are not dependencies of this plugin.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def _not_compiled() -> Iterator[None]:
    """Without CUDA, `megatron.core.jit.jit_fuser` decorates nothing.

    It is ``torch.compile``, whose first call imports inductor: 1.4 s of each rank. No function that it compiles runs on
    the CPU (`cpu_shim`).
    """
    if torch.cuda.is_available():
        yield
        return
    compiled = torch.compile
    torch.compile = _as_it_is
    try:
        yield
    finally:
        torch.compile = compiled


def _as_it_is(model: Callable[..., Any] | None = None, **_: object) -> Any:
    """``torch.compile`` as a decorator, with arguments or without, that changes nothing."""
    return _as_it_is if model is None else model


with warnings.catch_warnings(), _not_compiled():
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed", category=UserWarning)
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
