"""The report of a comparison, as text."""

from __future__ import annotations

from collections.abc import Iterator

from core_rl_conformance.differences.replay import Comparison, Difference

EXPLAINED = 1e-2
"""Relative distance between measured and predicted gradients, above which a term is missing."""


def report_of(left: str, right: str, comparison: Comparison) -> str:
    """Lines for a terminal: the first difference, all of them with their shares, and unexplained rests."""
    return "\n".join(_lines(left, right, comparison))


def _lines(left: str, right: str, comparison: Comparison) -> Iterator[str]:
    differences = comparison.differences
    if differences:
        first = differences[0]
        yield f"The trainers differ first in: {first.term}. Gradients are {comparison.distance:.1%} apart."
    else:
        yield f"No term differs. Gradients are {comparison.distance:.1e} apart."
    for difference in differences:
        yield ""
        yield f"{difference.term}{_share(difference)}"
        yield f"  {left}: {difference.left}"
        yield f"  {right}: {difference.right}"
    for name, reading in ((left, comparison.left), (right, comparison.right)):
        if reading.residual > EXPLAINED:
            yield ""
            yield (
                f"{name}: its terms explain its gradients up to {reading.residual:.1%} only, so that it has a term "
                "that is not listed; compare it with core-rl certify"
            )


def _share(difference: Difference) -> str:
    return "" if difference.share is None else f" ({difference.share:.0%} of the difference)"
