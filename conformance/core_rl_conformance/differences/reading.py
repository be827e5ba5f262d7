"""Reads the terms of a trainer's loss from its gradients on rollouts that are drawn for the purpose."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product, repeat
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from core_rl_conformance.differences.terms import (
    Clip,
    KLTerm,
    Mean,
    Terms,
    advantages_of,
    masks_of,
    shares_of,
    sums_of,
    weights_of,
)
from core_rl_conformance.differences.token_weights import TokenBasis, TokenWeights, basis_of_gradient
from core_rl_conformance.inputs.rollouts import Rollouts
from core_rl_oracle.loss_names import KLEstimator, Objective

Gradient = Callable[[Rollouts], Mapping[str, Tensor]]
"""The gradients of a trainer on rollouts."""
FITS = 5e-4
"""Largest relative distance between weights and a prediction by the right terms."""
OFF_POLICY = 0.3
"""Largest log-ratio of rollouts that tell objectives apart."""
ROUNDS = 5
"""Probes for one clip bound; each narrows it by the number of sequences."""
ABOVE, BELOW = (1e-4, 9.0), (1e-4, 0.95)
"""Distances of a ratio from 1 between which a clip bound is searched."""
NARROW = 1.002
"""Quotient of the ends of an interval that is not searched further."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The terms of one trainer's loss."""

    terms: Terms
    basis: TokenBasis
    residual: float
    """Relative distance between measured and predicted weights."""

    def predict(self, rollouts: Rollouts) -> Tensor:
        """The gradient of the terms on ``rollouts``, ``[P]``."""
        return self.basis.gradient(
            weights_of(self.terms, variant_of(rollouts, self.terms), self.basis.logprobs)
        )


def variant_of(rollouts: Rollouts, terms: Terms) -> Rollouts:
    """``rollouts`` with the mask and the advantages that ``terms`` name."""
    return dict(advantages_of(masks_of(rollouts)[terms.mask]))[terms.advantages]


def off_policy(rollouts: Rollouts, logprobs: Sequence[Tensor]) -> Rollouts:
    """The same, drawn by a policy some way from ``logprobs``, with a reference at some distance."""
    rng = random.Random(0)
    uneven = [
        values.new_tensor([rng.uniform(-OFF_POLICY, OFF_POLICY) for _ in values]) for values in logprobs
    ]
    return with_log_ratios(with_references(rollouts, logprobs), logprobs, uneven)


def read_terms(directory: Path, rollouts: Rollouts, gradient: Gradient) -> Reading:
    """The terms of the loss whose gradients ``gradient`` gives, on the model in ``directory``.

    On policy, ratios are 1, and show mask, advantages, KL, entropy and mean; then ratios show objective and bounds.
    """
    basis = basis_of_gradient(directory, [row.ids for row in rollouts.rows], gradient(rollouts))
    referred = with_references(rollouts, basis.logprobs)
    on_policy = with_log_ratios(referred, basis.logprobs, repeat(0.0))
    measured, unexplained = basis.solve(gradient(on_policy))
    candidates = sorted(_candidates(on_policy, basis, measured), key=lambda pair: pair[1])
    fits = [pair for pair in candidates if pair[1] <= max(FITS, 2 * candidates[0][1])]
    # The simplest terms that explain weights where all ratios are 1; k3 times the ratio has the gradient of k2 there.
    terms, residual = min(fits, key=lambda pair: _complexity(pair[0]))
    divergences = [fit.kl for fit, _ in fits if _around_kl(fit) == _around_kl(terms)]
    if terms.objective != "cross_entropy":
        terms, distance = _off_policy_terms(on_policy, basis, terms, divergences, gradient)
        residual = max(residual, distance)
    return Reading(terms=terms, basis=basis, residual=max(residual, unexplained))


def with_log_ratios(
    rollouts: Rollouts, logprobs: Sequence[Tensor], log_ratios: Iterable[Tensor | float]
) -> Rollouts:
    """The same, drawn by a policy of which the trained one differs by ``log_ratios``.

    For each row ``[L - 1]``, or one for all of its tokens.
    """
    rows = zip(rollouts.rows, logprobs, log_ratios, strict=False)
    return Rollouts(tuple(replace(row, old=(0.0, *(values - ratio).tolist())) for row, values, ratio in rows))


def with_references(rollouts: Rollouts, logprobs: Sequence[Tensor]) -> Rollouts:
    """The same with a reference policy at some distance from the trained one."""
    rng = random.Random(1)
    rows = []
    for row, values in zip(rollouts.rows, logprobs, strict=True):
        rows.append(replace(row, ref=(0.0, *(value + rng.uniform(-0.5, 0.5) for value in values.tolist()))))
    return Rollouts(tuple(rows))


def _around_kl(terms: Terms) -> tuple[str, str, str, str]:
    """Terms that stand next to the KL term."""
    return terms.mask, terms.advantages, terms.objective, terms.mean


def _candidates(
    rollouts: Rollouts, basis: TokenBasis, measured: TokenWeights
) -> Iterator[tuple[Terms, float]]:
    """All terms with ratios of 1, and their distances; coefficients by least squares."""
    lengths = [len(values) for values in basis.logprobs]
    target, nothing = measured.flat, torch.zeros(sum(lengths), dtype=torch.float64)
    kinds = [None, *(KLTerm(name, 1.0, ratio) for name in get_args(KLEstimator) for ratio in (False, True))]
    for mask, masked in masks_of(rollouts).items():
        sums = partial(sums_of, logprobs=basis.logprobs)
        imitation = sums(Terms(objective="cross_entropy"), masked).logprobs
        bases: dict[tuple[Objective, str], Tensor] = {("cross_entropy", "as given"): imitation}
        for name, variant in advantages_of(masked):
            bases["reinforce", name] = sums(Terms(), variant).logprobs
        idle = masked.with_advantages([0.0] * len(masked.rows))
        divergences = [None if kind is None else sums(Terms(kl=kind), idle).logprobs for kind in kinds]
        entropy = sums(Terms(entropy=1.0), idle).flat
        for mean, (kind, divergence) in product(get_args(Mean), zip(kinds, divergences, strict=True)):
            factors = shares_of(mean, masked.rows).repeat_interleave(torch.tensor(lengths))
            further = [entropy * factors.repeat(2)]
            further += [] if divergence is None else [torch.cat([divergence * factors, nothing])]
            columns = torch.stack(
                [
                    torch.stack([torch.cat([weights * factors, nothing]), *further])
                    for weights in bases.values()
                ]
            )
            values, distances = _least_squares(columns, target)
            for (objective, advantages), (scale, *coefs), distance in zip(
                bases, values.tolist(), distances.tolist(), strict=True
            ):
                if scale <= 0:
                    continue
                yield (
                    Terms(
                        mask=mask,
                        advantages=advantages,
                        temperature=basis.temperature,
                        objective=objective,
                        kl=_kl_term(kind, coefs[1:], scale),
                        entropy=_rounded(coefs[0] / scale),
                        mean=mean,
                        scale=_rounded(scale),
                    ),
                    distance,
                )


def _least_squares(columns: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients ``[B, C]`` of ``columns [B, C, n]`` that come nearest to ``target [n]``, and relative distances."""
    sizes = columns.norm(dim=2, keepdim=True).clamp(min=1e-300)
    unit = columns / sizes
    gram = unit @ unit.mT
    values = (torch.linalg.pinv(gram, hermitian=True) @ (unit @ target)[:, :, None])[:, :, 0]
    distances = ((values[:, None] @ unit)[:, 0] - target).norm(dim=1) / target.norm()
    return values / sizes[:, :, 0], distances


def _kl_term(kind: KLTerm | None, coefs: Sequence[float], scale: float) -> KLTerm:
    coef = _rounded(coefs[0] / scale) if coefs else 0.0
    return replace(kind, coef=coef) if kind is not None and coef else KLTerm()


def _rounded(value: float) -> float:
    """To four digits, and nothing for what rounding leaves."""
    return float(f"{value:.4g}") if abs(value) > FITS / 10 else 0.0


def _complexity(terms: Terms) -> tuple[int, int]:
    """The number of terms that are not plain, and of parts of their names."""
    marks = (
        terms.mask != "as given",
        terms.advantages != "as given",
        bool(terms.kl.coef),
        terms.kl.times_ratio,
        bool(terms.entropy),
        abs(terms.scale - 1.0) > FITS,
    )
    return sum(marks), len(terms.advantages) + get_args(Mean).index(terms.mean)


def _off_policy_terms(
    rollouts: Rollouts, basis: TokenBasis, terms: Terms, divergences: Sequence[KLTerm], gradient: Gradient
) -> tuple[Terms, float]:
    """The same terms with the objective, its bounds and the best of ``divergences``, and the distance."""
    probe = off_policy(rollouts, basis.logprobs)
    measured = basis.solve(gradient(probe))[0].flat
    clip = _clip(rollouts, basis, terms, gradient)
    bounded: Objective = "clipped" if clip.dual is None else "dual_clipped"
    clips: dict[Objective, Clip] = {
        bounded: clip,
        "reinforce": Clip(),
        "gspo": clip,
        "cispo": _saturation(rollouts, basis, terms, gradient),
    }
    distances = []
    for (objective, bounds), kl in product(clips.items(), divergences):
        candidate = replace(terms, objective=objective, clip=bounds, kl=kl)
        weights = weights_of(candidate, variant_of(probe, terms), basis.logprobs)
        distances.append((float((weights.flat - measured).norm() / measured.norm()), candidate))
    distance, best = min(distances, key=lambda pair: pair[0])
    return best, distance


def _signs(rollouts: Rollouts, terms: Terms) -> list[float]:
    """The sign of the advantage of each sequence; 0 where it has none, or none is trained."""
    signs = []
    for row in variant_of(rollouts, terms).rows:
        values = {
            math.copysign(1.0, a)
            for a, use in zip(row.advantages[1:], row.mask[1:], strict=True)
            if use and a
        }
        signs.append(values.pop() if len(values) == 1 else 0.0)
    return signs


def _gains(
    rollouts: Rollouts, basis: TokenBasis, terms: Terms, gradient: Gradient, log_ratios: Sequence[float]
) -> list[float]:
    """For each sequence, its gain relative to that of ``reinforce``, where all its tokens have one ratio."""
    probe = with_log_ratios(rollouts, basis.logprobs, log_ratios)
    variant = variant_of(probe, terms)
    idle = variant.with_advantages([0.0] * len(variant.rows))
    measured = basis.solve(gradient(probe))[0].logprobs
    reinforced = weights_of(replace(terms, objective="reinforce"), idle, basis.logprobs).logprobs
    plain = weights_of(Terms(mean=terms.mean, scale=terms.scale), variant, basis.logprobs).logprobs
    lengths = [len(values) for values in basis.logprobs]
    parts = zip((measured - reinforced).split(lengths), plain.split(lengths), strict=True)
    return [float(got @ unit / (unit @ unit).clamp(min=1e-300)) for got, unit in parts]


@dataclass
class _Sweep:
    """The search for a clip bound on sequences whose advantages have one sign."""

    rows: list[int]
    side: float
    """1 for ratios above 1, -1 below it."""
    ends: tuple[float, float]
    """Distances of a ratio from 1, between which the bound lies."""
    open: bool = True

    @property
    def log_ratios(self) -> dict[int, float]:
        """Of the sequences, from one end to the other."""
        low, high = map(math.log, self.ends)
        step = (high - low) / (len(self.rows) - 1)
        return {index: math.log1p(self.side * math.exp(low + step * n)) for n, index in enumerate(self.rows)}

    def narrow(self, gains: Sequence[float]) -> None:
        """Go on between the last ratio that gains and the first that gains nothing; end where there is none."""
        tried = self.log_ratios
        idle = {index: abs(gains[index]) < 0.5 * math.exp(ratio) for index, ratio in tried.items()}
        edge = [pair for pair in pairwise(self.rows) if idle[pair[1]] and not idle[pair[0]]]
        if not edge:
            self.open, self.rows = False, []
            return
        low, high = (abs(math.expm1(tried[index])) for index in edge[0])
        self.ends = low, high
        self.open = high / low > NARROW

    @property
    def bound(self) -> float | None:
        """The distance from 1 at which ratios begin to gain nothing."""
        return roundest(*self.ends) if self.rows else None


def _clip(rollouts: Rollouts, basis: TokenBasis, terms: Terms, gradient: Gradient) -> Clip:
    """Bounds of ratios, at all tokens of a sequence the same."""
    signs = _signs(rollouts, terms)
    positive, negative = ([n for n, sign in enumerate(signs) if sign == wanted] for wanted in (1.0, -1.0))
    high, low = _Sweep(positive, 1.0, ABOVE), _Sweep(negative, -1.0, BELOW)
    dual = _Sweep(negative, 1.0, ABOVE)
    for together in ((high, low), (dual,)):
        for sweep in together:
            if len(sweep.rows) < 2:
                sweep.open, sweep.rows = False, []
        for _ in range(ROUNDS):
            running = [sweep for sweep in together if sweep.open]
            if not running:
                break
            ratios = {index: ratio for sweep in running for index, ratio in sweep.log_ratios.items()}
            gains = _gains(rollouts, basis, terms, gradient, [ratios.get(n, 0.0) for n in range(len(signs))])
            for sweep in running:
                sweep.narrow(gains)
    return Clip(low=low.bound, high=high.bound, dual=None if dual.bound is None else 1.0 + dual.bound)


def _saturation(rollouts: Rollouts, basis: TokenBasis, terms: Terms, gradient: Gradient) -> Clip:
    """The bounds of ratios as weights, which a far ratio shows."""
    signs = _signs(rollouts, terms)
    bounds = {}
    for side, log_ratio in (("high", math.log(ABOVE[1])), ("low", math.log1p(-BELOW[1]))):
        gains = _gains(rollouts, basis, terms, gradient, [log_ratio] * len(signs))
        distances = [abs(gain - 1.0) for gain, sign in zip(gains, signs, strict=True) if sign]
        far = abs(math.expm1(log_ratio))
        value = _rounded(sorted(distances)[len(distances) // 2]) if distances else far
        bounds[side] = value if value < far * (1.0 - FITS) else None
    return Clip(low=bounds["low"], high=bounds["high"])


def roundest(low: float, high: float) -> float:
    """The number with the fewest decimals between two numbers."""
    for decimals in range(12):
        unit = 10.0**-decimals
        multiple = round((low + high) / 2 / unit) * unit
        if low <= multiple <= high and multiple > 0:
            return round(multiple, decimals)
    return (low + high) / 2
