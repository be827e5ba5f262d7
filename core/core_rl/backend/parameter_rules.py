"""The optimizer of each parameter: one rule by checkpoint name, the same for every engine and layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from core_rl.config.engine import OptimizerConfig, UpdateType
from core_rl.errors import ConfigError, raise_all

__all__ = ["ParameterOptions", "ParameterRules", "decays", "is_hidden_matrix"]

Shape = tuple[int, ...]
IN_LAYER = re.compile(r"\.\d+\.")
"""The number of a layer: embeddings, heads and the last norm have none."""


def decays(shape: Shape) -> bool:
    """Whether a parameter of this checkpoint shape decays by default: matrices do, norms and biases don't."""
    return len(shape) >= 2


def is_hidden_matrix(name: str, shape: Shape) -> bool:
    """Whether a checkpoint tensor is a matrix inside of a layer, which Muon is for."""
    return len(shape) == 2 and IN_LAYER.search(name) is not None


@dataclass(frozen=True, order=True)
class ParameterOptions:
    """Settings of the optimizer for one parameter."""

    type: UpdateType
    lr_factor: float
    """Multiplies the learning rate that `TrainBackend.step` gets."""
    weight_decay: float


@dataclass(frozen=True)
class ParameterRules:
    """Settings for each parameter, by its name and shape in the checkpoint."""

    config: OptimizerConfig

    def of(self, name: str, shape: Shape) -> ParameterOptions:
        """The settings for one checkpoint tensor.

        Raises `ConfigError` where a rule asks for Muon for what is no matrix.
        """
        kind: UpdateType = self.config.type
        if kind == "muon" and not is_hidden_matrix(name, shape):
            kind = "adamw"
        factor, decay = 1.0, self.config.weight_decay if decays(shape) else 0.0
        for rule in (rule for rule in self.config.rules if fnmatchcase(name, rule.pattern)):
            kind = rule.type or kind
            factor = factor if rule.lr_factor is None else rule.lr_factor
            decay = decay if rule.weight_decay is None else rule.weight_decay
        if kind == "muon" and len(shape) != 2:
            raise ConfigError(
                f"optimizer.rules: type 'muon' is for matrices, and {name!r} has the shape {list(shape)}; "
                "narrow the pattern, or add a later rule with type 'adamw' for it"
            )
        return ParameterOptions(kind, factor, decay)

    def common(self, parameter: str, parts: Mapping[str, Shape]) -> ParameterOptions:
        """The settings for an in-memory ``parameter`` that holds the checkpoint tensors ``parts`` (or slices of them).

        Raises `ConfigError` where they differ: an optimizer updates a parameter as one.
        """
        names: dict[ParameterOptions, str] = {}
        for name, shape in parts.items():
            names.setdefault(self.of(name, shape), name)
        if len(names) > 1:
            raise ConfigError(
                f"optimizer.rules differ for {' and '.join(map(repr, names.values()))}, which are one parameter in "
                f"memory, {parameter!r}; give all its parts the same settings: {', '.join(parts)}"
            )
        return next(iter(names))

    def check(self, trained: Mapping[str, Shape]) -> None:
        """Raise `ConfigError` for rules that match none of the ``trained`` checkpoint tensors."""
        examples = ", ".join(list(trained)[:3])
        problems = (
            f"the pattern {rule.pattern!r} matches no trained parameter; their names look like {examples}"
            for rule in self.config.rules
            if not any(fnmatchcase(name, rule.pattern) for name in trained)
        )
        raise_all(ConfigError, "optimizer.rules", problems)
