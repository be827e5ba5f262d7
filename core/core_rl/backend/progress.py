"""Progress of a training run, as an engine counts it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineProgress", "Pending"]


@dataclass(frozen=True, kw_only=True)
class EngineProgress:
    """Counters of one engine; part of every checkpoint."""

    lr_steps: int = 0
    """Calls of ``lr_scheduler_step()``: the learning rate is a pure function of it."""
    updates: int = 0
    """Successful optimizer steps: Adam's own count."""
    version: int = 0
    """The version that the driver gave to the weights."""


@dataclass
class Pending:
    """Accumulation since the last optimizer step."""

    passes: int = 0
    weight: float = 0.0
    finite: bool = True
    reduced: bool = False
    failed: bool = False
    """A pass raised, so that the gradients are of a part of the batch."""
