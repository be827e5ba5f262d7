"""Parts of `OptimizerConfig`: rules for some parameters, and the fields of Muon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from core_rl.config.base import Config

__all__ = ["MOMENT_BYTES", "MuonConfig", "ParameterRule", "UpdateType"]

UpdateType = Literal["adamw", "adamw_8bit", "muon"]
MOMENT_BYTES: Mapping[UpdateType, float] = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "muon": 4.0}
"""Bytes of the moments of one weight: both of AdamW in float32, or in 8 bits with a scale for each block of 256; and
Muon's momentum."""


class ParameterRule(Config):
    """Settings of the optimizer for the parameters that a pattern matches. Null leaves a setting as it is."""

    pattern: str = Field(min_length=1)
    """A glob pattern of checkpoint names, such as ``model.embed_tokens.*``."""
    lr_factor: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """Multiplies the learning rate of every step."""
    weight_decay: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """Replaces `OptimizerConfig.weight_decay`; of norms and biases, which otherwise do not decay, as well."""
    type: UpdateType | None = None
    """Replaces the choice of `OptimizerConfig.type`; ``muon`` is for matrices alone."""

    @model_validator(mode="after")
    def _sets_something(self) -> Self:
        if self.lr_factor is None and self.weight_decay is None and self.type is None:
            raise ValueError("the rule sets nothing; give it lr_factor, weight_decay or type")
        return self


class MuonConfig(Config):
    """Muon (https://kellerjordan.github.io/posts/muon/), as `torch.optim.Muon` of torch 2.13 has it."""

    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the running mean of the gradient."""
    nesterov: bool = True
    """Look one step of the momentum ahead."""
    ns_steps: int = Field(default=5, ge=1, lt=100)
    """Newton-Schulz iterations, which make the singular values of an update nearly equal."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """The factor of the learning rate of a matrix ``[A, B]``: ``sqrt(max(1, A / B))``, or
    ``0.2 * sqrt(max(A, B))`` (arXiv:2502.16982), with which rates and decay are those of AdamW."""
