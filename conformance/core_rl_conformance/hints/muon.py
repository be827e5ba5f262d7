"""Known mistakes around Muon and rules for parameters: steps with each mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from core_rl_oracle.muon import MixedOptimizer, MixedState, Settings, newton_schulz, rate_factor, scaled
from core_rl_oracle.tolerance import Tolerance, largest_difference

__all__ = ["FUSED", "MixedSteps", "likely_mistake", "of_fused", "of_shards"]

Matrices = Mapping[str, Tensor]
FUSED = {
    "q, k and v": re.compile(r"(.*)\.[qkv]_proj\.weight"),
    "gate and up projection": re.compile(r"(.*)\.(?:gate|up)_proj\.weight"),
    "all experts of a layer": re.compile(r"(.*\.experts)\.\d+(\.\w+\.weight)"),
}


@dataclass(frozen=True, kw_only=True)
class MixedSteps:
    """Steps from ``params`` and moments of zero: the gradients and the learning rate of each."""

    config: MixedOptimizer
    params: Mapping[str, Tensor]
    grads: Sequence[Mapping[str, Tensor]]
    rates: Sequence[float]

    def start(self) -> MixedState:
        """Weights and moments before the steps."""
        return MixedState.start(self.params, self.config.settings)

    def state(self) -> MixedState:
        """Weights and moments after the steps."""
        state = self.start()
        for grads, rate in zip(self.grads, self.rates, strict=True):
            self.config.step(state, grads, rate)
        return state


def likely_mistake(
    steps: MixedSteps,
    weights: Mapping[str, Tensor],
    allowed: Mapping[str, Tolerance],
    defaults: Mapping[str, Settings],
    ranks: int,
) -> str | None:
    """The known mistake that leads to the ``weights`` of an engine on so many ``ranks``; None where none does.

    ``defaults`` are the settings without rules.
    """
    right = steps.state().params
    off = {name for name, value in right.items() if not allowed[name].allows(_far(weights[name], value))}
    for sentence, configs in _mistakes(steps.config, defaults, ranks):
        wrong = [replace(steps, config=config).state().params for config in configs]
        if off and all(
            any(_near(weights[name], params[name], right[name]) for params in wrong) for name in off
        ):
            return sentence
    return None


def _near(got: Tensor, wrong: Tensor, right: Tensor) -> bool:
    """Whether ``wrong`` explains ``got``; a mistake may amplify rounding, so limits for right values do not fit."""
    return _far(got, wrong) <= 0.05 * _far(right, wrong)


def _far(got: Tensor, expected: Tensor) -> float:
    return largest_difference(got, expected)


def _mistakes(
    config: MixedOptimizer, defaults: Mapping[str, Settings], ranks: int
) -> Iterator[tuple[str, Sequence[MixedOptimizer]]]:
    """Sentences, and the ways to make the mistake: each tensor is wrong in some way of these."""
    if any(setting.muon for setting in config.settings.values()):
        for parts in dict.fromkeys((2, ranks)):
            shards = [
                replace(config, updates=partial(of_shards, parts=parts, dim=dim, factor=factor))
                for dim in (0, 1)
                for factor in (False, True)
            ]
            yield f"Muon's update is that of a shard, 1 of {parts} parts of a matrix", shards
        for label, pattern in FUSED.items():
            sentence = f"Muon's update is that of one matrix with {label}"
            yield sentence, [replace(config, updates=partial(of_fused, pattern=pattern))]
        yield "Muon's momentum is without Nesterov's step", [replace(config, nesterov=False)]
    setting = config.settings
    decay = {
        name: replace(setting[name], weight_decay=plain.weight_decay) for name, plain in defaults.items()
    }
    rate = {name: replace(setting[name], lr_factor=plain.lr_factor) for name, plain in defaults.items()}
    shifted = dict(zip(setting, [*setting.values()][-1:] + [*setting.values()][:-1], strict=True))
    moved = {
        name: replace(setting[name], weight_decay=shifted_setting.weight_decay)
        for name, shifted_setting in shifted.items()
    }
    for sentence, settings in {
        "the rules are ignored": defaults,
        "the decay of the rules is ignored": decay,
        "the rates of the rules are ignored": rate,
        "each parameter has the decay of the one before it": moved,
    }.items():
        yield sentence, [replace(config, settings=settings)]


def of_shards(
    config: MixedOptimizer, matrices: Matrices, parts: int, dim: int, factor: bool
) -> dict[str, Tensor]:
    """The updates of shards along ``dim``; with ``factor``, their learning rate is that of their shape as well."""
    updates = {}
    for name, matrix in matrices.items():
        updates[name] = torch.cat(
            [
                rate_factor(config, part if factor else matrix) * newton_schulz(part, config.ns_steps)
                for part in matrix.chunk(parts, dim)
            ],
            dim,
        )
    return updates


def of_fused(config: MixedOptimizer, matrices: Matrices, pattern: re.Pattern[str]) -> dict[str, Tensor]:
    """The updates of matrices with equal groups of ``pattern`` as one matrix."""
    groups: dict[object, list[str]] = {}
    for name in matrices:
        match = pattern.fullmatch(name)
        groups.setdefault(name if match is None else match.groups(), []).append(name)
    updates: dict[str, Tensor] = {}
    for names in groups.values():
        full = scaled(config, torch.cat([matrices[name] for name in names]))
        updates |= dict(zip(names, full.split([len(matrices[name]) for name in names]), strict=True))
    return updates
