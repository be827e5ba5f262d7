"""AdamW with moments of 8 bits, which torchao quantizes, and access to them as float32 tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from core_rl.config.engine import OptimizerConfig
from core_rl.registry.packages import import_extra

__all__ = ["AdamW8Bit", "as_float32", "is_eight_bit", "memory_of"]

HELD = ("codes", "scale")
"""Tensors of one moment: a byte for each weight, and a float32 scale for each block of weights."""


class AdamW8Bit:
    """torchao's ``AdamW8bit`` over ``groups`` of another optimizer, in whose ``state`` it has its moments.

    Rates, decay and step counts are read from there. On the CPU its update runs without a compiler. Raises
    `MissingPackage` without torchao.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        state: MutableMapping[Tensor, dict[str, Any]],
        config: OptimizerConfig,
    ) -> None:
        self._groups = groups
        group_options = [
            {"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups
        ]
        with _errors_only("torchao", "torch.utils._pytree"):
            torchao = import_extra("torchao.optim", "optimizer.type 'adamw_8bit' needs torchao")
        self._optimizer = torchao.AdamW8bit(group_options, lr=config.lr, betas=config.betas, eps=config.eps)
        self._optimizer.state = state

    def step(self) -> None:
        """Update the parameters that have a gradient."""
        for group, quantized in zip(self._groups, self._optimizer.param_groups, strict=True):
            quantized["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
        on_cpu = all(p.device.type == "cpu" for group in self._groups for p in group["params"])
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            self._optimizer.step()


def is_eight_bit(moment: Tensor) -> bool:
    """Whether ``moment`` is stored in 8 bits."""
    return all(hasattr(moment, name) for name in HELD)


def memory_of(moment: Tensor) -> dict[str, Tensor]:
    """The tensors that hold ``moment`` in 8 bits, by name."""
    return {name: getattr(moment, name) for name in HELD}


@contextmanager
def as_float32(moment: Any) -> Iterator[Tensor]:
    """The values of ``moment``; changed values are quantized at the end of the context."""
    values: Tensor = moment.dequantize()
    yield values
    # Requantized codes may differ: values that are only read keep their codes.
    if not torch.equal(values, moment.dequantize()):
        moment.copy_(values)


@contextmanager
def _errors_only(*names: str) -> Iterator[None]:
    """Without warnings of these loggers: torchao's import reports each CUDA library that does not load."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
