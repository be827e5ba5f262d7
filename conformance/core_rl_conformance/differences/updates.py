"""Reads a trainer's AdamW (betas, weight decay, clipping norm) and its precision from weights and gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core_rl_conformance.differences.reading import roundest
from core_rl_oracle.oracle import grad_norm

UPDATE = ("betas", "weight decay", "clipping norm")
SAMPLE = 20_000
"""Elements that are fitted, at most; and `FEWEST` at least."""
FEWEST = 100
SMALLEST = 1e-6
"""Gradients below this, other than 0, are too close to the epsilon of AdamW and to rounding."""
RESOLUTION = 0.1
"""Rounding of a float32 weight in relation to the learning rate, at most."""
SURE = 1e-4
"""Error of a move besides that rounding: that of float32 gradients."""
STARTS = ((0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.98, 0.98))
EPS = 1e-8
VAGUE = 0.1
"""Error of the logarithm of a clipping norm that gives no number."""
SHIFT = 1e-5
"""Distance from a place, for slopes."""
EXPLAINED = 0.05
"""Largest relative distance between steps and a prediction by the right settings."""
DIGITS = 0.01
"""Relative error of a fitted number, at least; the roundest number within it is taken."""
ERRORS = 4.0
"""Standard errors that a fitted number may be off."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step."""

    rate: float
    grads: Mapping[str, Tensor]
    """Before clipping."""
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    @property
    def norm(self) -> float:
        return grad_norm(self.grads)


@dataclass(frozen=True, kw_only=True)
class _Samples:
    """``P`` elements in ``T`` steps, float64."""

    rates: Tensor
    """``[T]``"""
    norms: Tensor
    """``[T]``"""
    grads: Tensor
    """``[T, P]``"""
    moves: Tensor
    """``[T, P]``: differences of weights, divided by the rate; 0 where that is 0."""
    weights: Tensor
    """``[T, P]``: weights that decay; 0 for others and where the rate is 0."""
    errors: Tensor
    """``[T, P]``: rounding errors of moves."""

    def residual(self, place: Tensor) -> tuple[Tensor, float]:
        """Moves that AdamW with ``place`` (log of 1 - beta1, of 1 - beta2, of the norm) leaves, and the best decay.

        Moves are in units of their ``errors``.
        """
        beta1, beta2 = (1.0 - place[:2].exp()).tolist()
        scales = (place[2].exp() / (self.norms + 1e-6)).clamp(max=1.0)
        first, second = torch.zeros(2, self.grads.shape[1], dtype=torch.float64)
        directions = []
        for count, grad in enumerate(self.grads * scales[:, None], 1):
            first = beta1 * first + (1 - beta1) * grad
            second = beta2 * second + (1 - beta2) * grad.square()
            root = (second / (1 - beta2**count)).sqrt()
            directions.append(first / (1 - beta1**count) / (root + EPS))
        rest = (self.moves - torch.stack(directions) * (self.rates > 0)[:, None]) / self.errors
        weights = self.weights / self.errors
        decay = float((rest * weights).sum() / weights.square().sum().clamp(min=1e-300))
        return (rest - decay * weights).flatten(), decay

    def slopes(self, place: Tensor, rest: Tensor) -> Tensor:
        """Slopes of the ``rest`` at ``place``, ``[3, TP]``."""
        shifts = SHIFT * torch.eye(3, dtype=torch.float64)
        return torch.stack([(self.residual(place + shift)[0] - rest) / SHIFT for shift in shifts])


def read_update(steps: Sequence[Step]) -> dict[str, str] | None:
    """Betas, weight decay of matrices, and clipping norm; None for steps that are too small.

    Another rule than AdamW has the text ``not AdamW`` for each.
    """
    samples = _samples_of(steps)
    if samples is None:
        return None
    ends = samples.norms.min().log(), samples.norms.max().log()
    limits = [*torch.linspace(float(ends[0]) - 0.1, float(ends[1]), 6).tolist(), float(ends[1]) + 1.0]
    starts = [
        torch.tensor([math.log1p(-one), math.log1p(-two), limit], dtype=torch.float64)
        for one, two in STARTS
        for limit in limits
    ]
    starts.sort(key=lambda start: float(samples.residual(start)[0].norm()))
    place = min(
        (_descend(samples, start) for start in starts[:2]), key=lambda x: float(samples.residual(x)[0].norm())
    )
    unclipped = torch.stack([*place[:2], ends[1] + 1.0])
    if samples.residual(unclipped)[0].norm() <= (1 + DIGITS) * samples.residual(place)[0].norm():
        place = unclipped  # a limit at the largest norm fits as well
    rest, decay = samples.residual(place)
    if (rest * samples.errors.flatten()).norm() > EXPLAINED * samples.moves.norm():
        return dict.fromkeys(UPDATE, "not AdamW")
    spread = ERRORS * float(rest.norm()) / math.sqrt(rest.numel())
    slopes = samples.slopes(place, rest)
    errors = spread * torch.linalg.pinv(slopes @ slopes.T, hermitian=True).diagonal().clamp(min=0).sqrt()
    error = spread / float((samples.weights / samples.errors).norm().clamp(min=1e-300))
    # Float32 rounds 1 - rate * decay.
    rounding = torch.finfo(torch.float32).eps / 4 / float(samples.rates.max())
    one, two, norm = (
        _round(value, value * float(part)) for value, part in zip(place.exp().tolist(), errors, strict=True)
    )
    limit = float(place[2])
    clipped = f"{norm:g}" if float(errors[2]) < VAGUE else "below all gradients"
    return {
        "betas": f"{1 - one:g}, {1 - two:g}",
        "weight decay": f"{_round(decay, error + rounding):g}" if abs(decay) > max(error, 1e-4) else "0",
        "clipping norm": clipped if limit < ends[1] else "none",
    }


def _round(value: float, error: float) -> float:
    """The roundest number up to ``error`` from ``value``."""
    width = min(max(DIGITS * abs(value), error), 0.5 * abs(value))
    return math.copysign(roundest(abs(value) - width, abs(value) + width), value)


def _samples_of(steps: Sequence[Step]) -> _Samples | None:
    names = sorted(steps[0].grads.keys() & steps[0].before.keys())
    rates = torch.tensor([step.rate for step in steps], dtype=torch.float64)
    if not (rates > 0).any():
        return None

    def flat(values: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([values[name].double().flatten() for name in names])

    grads = torch.stack([flat(step.grads) for step in steps])
    before = torch.stack([flat(step.before) for step in steps])
    decays = flat(
        {name: torch.full_like(steps[0].before[name], steps[0].before[name].dim() > 1) for name in names}
    )
    after = torch.stack([flat(step.after) for step in steps])
    moving = (rates > 0)[:, None]
    fine = before.abs().max(0).values * torch.finfo(torch.float32).eps < 2 * RESOLUTION * rates.max()
    clear = (grads.abs() > SMALLEST).all(0)
    index = (fine & clear).nonzero()[:, 0]
    if len(index) < FEWEST:
        return None
    index = index[:: -(-len(index) // SAMPLE)]
    moves = torch.where(moving, (before - after) / rates.clamp(min=1e-300)[:, None], 0.0)
    return _Samples(
        rates=rates,
        norms=torch.tensor([step.norm for step in steps], dtype=torch.float64),
        grads=grads[:, index],
        moves=moves[:, index],
        weights=(before * decays * moving)[:, index],
        errors=SURE
        + (before.abs() * torch.finfo(torch.float32).eps / 2 / rates.clamp(min=1e-30)[:, None])[:, index],
    )


def _descend(samples: _Samples, start: Tensor) -> Tensor:
    """The lowest place of the residual near ``start``, by steps of Levenberg and Marquardt."""
    place, damping = start, 1e-3
    rest, _ = samples.residual(place)
    for _ in range(40):
        slopes = samples.slopes(place, rest)
        gram = slopes @ slopes.T
        scale = gram.diagonal().clamp(min=1e-9 * float(gram.max()) + 1e-300)
        step = torch.linalg.solve(gram + damping * torch.diag(scale), slopes @ rest)
        moved = torch.minimum(place - step.clamp(-1, 1), place.new_tensor([0.0, 0.0, math.inf]))
        left, _ = samples.residual(moved)
        if left.norm() < rest.norm():
            ready = rest.norm() - left.norm() < 1e-6 * rest.norm()
            place, rest, damping = moved, left, damping / 5
            if ready:
                break
        else:
            damping *= 5
            if damping > 1e6:
                break
    return place


def precision_of(grads: Mapping[str, Tensor]) -> str:
    """The precision of matrix products: float32 gradients of lower ones end in zero bits."""
    values = torch.cat([grad.detach().float().flatten() for grad in grads.values()])
    # NaN, as of advantages that are whitened over one sequence, and negative zeros end in zero bits too.
    bits = values[values.isfinite() & (values != 0)].view(torch.int32)
    for dropped, name in ((16, "bfloat16"), (13, "float16")):
        if len(bits) and (bits % (1 << dropped) == 0).double().mean() > 0.5:
            return name
    return "float32"
