"""Weights of tokens in a gradient: factors of the gradient of each log-prob and entropy.

Every loss on rollouts has a gradient ``sum_t w_t * grad(log p_t) + e_t * grad(H_t)``. A tiny model has more parameters
than a batch has tokens, so that ``w`` and ``e`` follow from the gradient by least squares, whatever the loss is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core_rl_oracle.oracle import Oracle, OracleSequence

COLDEST, HOTTEST = math.log(0.1), math.log(4.0)
"""Logarithms of temperatures between which that of a gradient is searched."""
START = (0.7, 1.3)
"""Temperatures that the search begins with, besides 1."""
PARABOLAS = 8
"""Steps of the search, at most."""
EXPLAINED = 1e-3
"""Relative residual of a gradient at the right temperature, at most; 1 % off it is three times as large."""
PER_WEIGHT = 4
"""Elements of the gradient for each weight that is solved for, at least."""


@dataclass(frozen=True, kw_only=True)
class TokenWeights:
    """Weights of ``N`` tokens, float64."""

    logprobs: Tensor
    """``[N]``"""
    entropy: Tensor
    """``[N]``"""

    @property
    def flat(self) -> Tensor:
        """Both, ``[2N]``."""
        return torch.cat([self.logprobs, self.entropy])


@dataclass(frozen=True, kw_only=True)
class TokenBasis:
    """Gradients of log-prob and entropy of all ``N`` tokens but the first of each sequence, at one temperature."""

    temperature: float
    logprobs: Sequence[Tensor]
    """``[L - 1]`` for each sequence."""
    names: tuple[str, ...]
    """Parameters, in the order of the columns."""
    rows: Tensor
    """``[2N, P]``: log-probs, then entropies."""

    def solve(self, grads: Mapping[str, Tensor]) -> tuple[TokenWeights, float]:
        """The weights of a gradient, and the relative size of the rest."""
        target = self.flat(grads)
        weights = torch.linalg.solve(self.rows @ self.rows.T, self.rows @ target)
        residual = float((weights @ self.rows - target).norm() / target.norm().clamp(min=1e-300))
        half = len(weights) // 2
        return TokenWeights(logprobs=weights[:half], entropy=weights[half:]), residual

    def gradient(self, weights: TokenWeights) -> Tensor:
        """``[P]``"""
        return weights.flat @ self.rows

    def flat(self, grads: Mapping[str, Tensor]) -> Tensor:
        """``[P]``, float64."""
        return torch.cat([grads[name].double().flatten() for name in self.names])


def _basis(directory: Path, rows: Sequence[Sequence[int]], temperature: float) -> TokenBasis:
    """The basis of sequences ``rows`` in the model of ``directory``; a backward pass for each token and output."""
    oracle = Oracle(directory)
    names = _last_names(oracle, 2 * PER_WEIGHT * sum(map(len, rows)))
    by_name = dict(oracle.model.named_parameters())
    parameters = [by_name[name] for name in names]
    gradients: dict[str, list[Tensor]] = {"logprobs": [], "entropy": []}
    logprobs = []
    for ids in rows:
        outputs = oracle.outputs(OracleSequence(input_ids=list(ids)), temperature, refuse=False)
        logprobs.append(outputs["logprobs"][1:].detach())
        for kind, parts in gradients.items():
            values = outputs[kind][1:]
            grads = torch.autograd.grad(
                values,
                parameters,
                torch.eye(len(values), dtype=values.dtype),
                retain_graph=True,
                is_grads_batched=True,
            )
            parts.append(torch.cat([grad.flatten(1) for grad in grads], dim=1))
    stacked = torch.cat(gradients["logprobs"] + gradients["entropy"])
    return TokenBasis(temperature=temperature, logprobs=logprobs, names=names, rows=stacked)


def basis_of_gradient(
    directory: Path, rows: Sequence[Sequence[int]], grads: Mapping[str, Tensor]
) -> TokenBasis:
    """The basis at the temperature at which the tokens explain ``grads`` best; 1 where that explains them.

    Parabolas through the squared residuals at three temperatures, on a logarithmic scale.
    """

    def squared(place: float) -> float:
        return _basis(directory, rows, math.exp(place)).solve(grads)[1] ** 2

    plain = _basis(directory, rows, 1.0)
    residual = plain.solve(grads)[1]
    if residual <= EXPLAINED:
        return plain
    places = {0.0: residual**2} | {place: squared(place) for place in map(math.log, START)}
    for _ in range(PARABOLAS):
        best = sorted(places, key=lambda place: places[place])[:3]
        place = min(max(_lowest(best, [places[x] for x in best]), COLDEST), HOTTEST)
        if any(abs(place - tried) < EXPLAINED for tried in places):
            break
        places[place] = squared(place)
    lowest = min(places, key=lambda place: places[place])
    # Recipes have round numbers.
    return _basis(directory, rows, round(math.exp(lowest), 2))


def _lowest(x: Sequence[float], y: Sequence[float]) -> float:
    """The place of the extremum of the parabola through three points."""
    left, right = (x[1] - x[0]) * (y[1] - y[2]), (x[1] - x[2]) * (y[1] - y[0])
    divisor = left - right
    if not divisor:
        return x[0]
    return x[1] - ((x[1] - x[0]) * left - (x[1] - x[2]) * right) / (2 * divisor)


def _last_names(oracle: Oracle, elements: int) -> tuple[str, ...]:
    """Parameters of the last layers with at least so many ``elements``, for which a backward pass is short.

    Tables of the vocabulary are left out: they are large, and most of their rows have no gradient.
    """
    names: list[str] = []
    for name, value in reversed(list(oracle.model.named_parameters())):
        if oracle.model.config.vocab_size not in value.shape:
            names.append(name)
            elements -= value.numel()
        if elements <= 0:
            break
    return tuple(names)
