"""Known shapes of errors in token outputs: the wrong values, and their tokens.

Each shape is a small function. A changed value must explain every wrong token; a set of
tokens is named only if it holds all wrong ones, at least half of it is wrong, and tokens outside of
it are right. The smallest of several such sets counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core_rl_conformance.hints.token_places import PLACES
from core_rl_conformance.hints.tokens import Tokens, constant_factor, show_factor
from core_rl_oracle.tolerance import Tolerance, largest_difference

__all__ = ["token_hints"]


def token_hints(tokens: Tokens) -> list[str]:
    """Hints on the shape and the positions of the wrong values; at most one line for each."""
    if int(tokens.wrong.sum()) < 2:
        return []
    value = next((sentence for shape in VALUES if (sentence := shape(tokens))), None)
    hints = [] if value is None else [f"it looks like: {value}"]
    matching = [part for shape in PLACES for part in shape(tokens) if _explains(part[1], tokens)]
    if matching:
        hints.append(min(matching, key=lambda part: int(part[1].sum()))[0])
    elif value is None:
        hints += [trend for shape in TRENDS if (trend := shape(tokens))][:1]
    return hints


def _explains(inside: Tensor, tokens: Tokens) -> bool:
    """All wrong tokens are inside, half of those inside are wrong, and some outside are right."""
    # First tokens are 0 by definition, hence nearly always right: they prove nothing.
    counted = (tokens.position > 0) | tokens.wrong | tokens.scalars
    if bool((tokens.wrong & ~inside).any()) or not bool((~inside & counted).any()):
        return False
    return 2 * int(tokens.wrong.sum()) >= int((inside & counted).sum())


# ------------------------------------------------------- the values


def _not_finite(tokens: Tokens) -> str | None:
    finite = torch.isfinite(tokens.got[tokens.wrong]).flatten(1 if tokens.got.dim() > 1 else 0)
    return "they are not finite" if not bool(finite.any()) else None


def _zero(tokens: Tokens) -> str | None:
    return "they are all zero" if not bool(tokens.got[tokens.wrong].any()) else None


def _shifted(tokens: Tokens) -> str | None:
    if tokens.got.dim() > 1:
        return None
    pairs = list(zip(tokens.got.split(tokens.lengths), tokens.expected.split(tokens.lengths), strict=True))
    pairs = [(left, right) for left, right in pairs if len(left) > 2]
    for late, place in ((True, "late"), (False, "early")):
        parts = [(left[1:], right[:-1]) if late else (left[:-1], right[1:]) for left, right in pairs]
        if parts and all(tokens.tolerance.allows(largest_difference(left, right)) for left, right in parts):
            return f"every value stands one position too {place}; a value at t belongs to token t"
    return None


def _permuted(tokens: Tokens) -> str | None:
    """Equal as multisets: sorting brings the best partners together."""
    if tokens.got.dim() > 1 or not _same_sorted(tokens.got, tokens.expected, tokens.tolerance):
        return None
    parts = zip(tokens.got.split(tokens.lengths), tokens.expected.split(tokens.lengths), strict=True)
    if all(_same_sorted(left, right, tokens.tolerance) for left, right in parts):
        return "each sequence has its own values, in another order"
    return (
        "the values are right and belong to other sequences: the order is not restored after a sort or a cut"
    )


def _same_sorted(left: Tensor, right: Tensor, tolerance: Tolerance) -> bool:
    return tolerance.allows(largest_difference(left.sort().values, right.sort().values))


def _multiplied(tokens: Tokens) -> str | None:
    factor = constant_factor(tokens.got[tokens.wrong], tokens.expected[tokens.wrong], tokens.tolerance)
    label = "everything is" if bool(tokens.wrong[tokens.position > 0].all()) else "the wrong ones are"
    return None if factor is None else f"{label} multiplied by {show_factor(factor)}"


def _moved(tokens: Tokens) -> str | None:
    difference = (tokens.got - tokens.expected)[tokens.wrong]
    middle = float(difference.median())
    allowed = 1e-3 * abs(middle) + 2 * tokens.tolerance.limit
    same = abs(middle) > 5 * tokens.tolerance.limit and bool(((difference - middle).abs() <= allowed).all())
    return f"the wrong ones are all off by {middle:+.6g}" if same else None


VALUES: tuple[Callable[[Tokens], str | None], ...] = (
    _not_finite,
    _zero,
    _shifted,
    _permuted,
    _multiplied,
    _moved,
)


# ----------------------------------------------------- how errors are spread


def _grows(tokens: Tokens) -> str | None:
    """Whether errors grow from quarter to quarter of the sequences."""
    error = _errors(tokens)
    counted = (tokens.position > 0) & (tokens.length >= 12)
    if not bool(counted.any()) or not bool(torch.isfinite(error).all()):
        return None
    quarter = (4 * tokens.position // tokens.length)[counted]
    means = [float(error[counted][quarter == number].mean()) for number in range(4)]
    grows = all(later > earlier for earlier, later in zip(means, means[1:], strict=False))
    if not grows or means[3] < 3 * means[0]:
        return None
    return (
        f"errors grow with the position: {means[0]:.1e} on average in the first quarter of sequences, "
        f"{means[3]:.1e} in the last: position ids, rotary embedding, or attention?"
    )


def _small(tokens: Tokens) -> str | None:
    """Whether most values are wrong, and all of them by little."""
    share = float(_errors(tokens).max() / tokens.expected.abs().max())
    if not share < 1 / 64 or 2 * int(tokens.wrong.sum()) < int((tokens.position > 0).sum()):
        return None
    return (
        f"errors are everywhere and small, {share:.1e} of the largest value at most: a smaller dtype or TF32 "
        "somewhere, or another constant (an epsilon)?"
    )


def _errors(tokens: Tokens) -> Tensor:
    error = (tokens.got - tokens.expected).abs()
    return error.flatten(1).amax(1) if error.dim() > 1 else error


TRENDS: tuple[Callable[[Tokens], str | None], ...] = (_grows, _small)
