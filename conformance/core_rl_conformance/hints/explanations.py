"""Explanations of wrong values that need more than the values: the same call again, and the oracle with a mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from core_rl_oracle.oracle import Gradients
from core_rl_oracle.tolerance import Tolerance, largest_difference

Mistakes = Callable[[], Iterator[tuple[str, Gradients]]]
"""Sentences about known mistakes, and the loss and gradients that each would give."""
Again = Callable[[], tuple[float, Mapping[str, Tensor]]]
"""The same pass once more: its loss, and its gradients by name."""
NEAR = 4.0
"""Times the tolerance of the right values, without a mistake."""


def explain_tokens(
    got: Sequence[Tensor],
    expected: Sequence[Tensor],
    tolerance: Tolerance,
    mistakes: Callable[[], Iterator[tuple[str, Sequence[Tensor]]]],
    again: Callable[[], Sequence[Tensor]] | None,
) -> str | None:
    """The explanation of wrong values, one tensor for each sequence: another answer to the same call, or a mistake.

    The mistake explains all wrong values; others may be right, as where it is made for some sequences only.
    """
    if again is not None and (distance := _distance(got, again())) > tolerance.limit:
        return _not_deterministic(distance)
    near = NEAR * tolerance.limit
    return next((sentence for sentence, wrong in mistakes() if _fits(got, expected, wrong, near)), None)


def explain_loss(got: float, tolerance: Tolerance, mistakes: Mistakes, again: Again | None) -> str | None:
    """The same for the loss of a pass."""
    if again is not None and not abs((second := again()[0]) - got) <= tolerance.limit:
        return _not_deterministic(abs(second - got))
    near = NEAR * tolerance.limit
    return next((sentence for sentence, wrong in mistakes() if abs(wrong.loss - got) <= near), None)


def explain_named(
    got: Mapping[str, Tensor], tolerances: Mapping[str, Tolerance], mistakes: Mistakes, again: Again | None
) -> str | None:
    """The same for gradients by name."""
    if again is not None:
        second = again()[1]
        moved = {
            name: largest_difference(value, second[name]) for name, value in got.items() if name in second
        }
        worst = max(moved, key=lambda name: moved[name] / max(tolerances[name].limit, 1e-300), default=None)
        if worst is not None and not moved[worst] <= tolerances[worst].limit:
            return _not_deterministic(moved[worst])
    return next((sentence for sentence, wrong in mistakes() if _same(got, wrong.grads, tolerances)), None)


def _fits(got: Sequence[Tensor], right: Sequence[Tensor], wrong: Sequence[Tensor], near: float) -> bool:
    """Whether each value is near the wrong or the right one, and several are near the wrong one alone."""
    if [value.shape for value in got] != [value.shape for value in wrong]:
        return False
    actual, expected, mistaken = map(_flat, (got, right, wrong))
    is_wrong, is_right = (actual - mistaken).abs() <= near, (actual - expected).abs() <= near
    return bool((is_wrong | is_right).all()) and int((is_wrong & ~is_right).sum()) > 1


def _flat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.double().flatten() for value in values])


def _distance(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    if [value.shape for value in left] != [value.shape for value in right]:
        return float("inf")
    return max((largest_difference(a, b) for a, b in zip(left, right, strict=True)), default=0.0)


def _same(
    got: Mapping[str, Tensor], wrong: Mapping[str, Tensor], tolerances: Mapping[str, Tolerance]
) -> bool:
    return got.keys() == wrong.keys() and all(
        largest_difference(got[name], value) <= NEAR * tolerances[name].limit for name, value in wrong.items()
    )


def _not_deterministic(distance: float) -> str:
    return (
        f"not deterministic: the same call gives other values the second time, by {distance:.1e}; dropout that is on, "
        "memory that nothing has written, or a race"
    )
