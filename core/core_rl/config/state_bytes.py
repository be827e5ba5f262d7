"""What the state of a model takes on one rank of a train engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StateBytes"]


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes on one rank."""

    weights: float
    """In float32, and in the compute dtype where the engine keeps a copy in it."""
    gradients: float
    moments: float
    """AdamW's two."""
