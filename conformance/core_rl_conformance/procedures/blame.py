"""Which of two engines is off, by the oracle, so that a correct engine never fails for its partner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from core_rl.errors import CoreRLError
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.expected_values import ExpectedOutputs
from core_rl_conformance.hints.diagnose import Finding, compare_named, compare_scalar, compare_tokens
from core_rl_conformance.hints.tokens import Places
from core_rl_conformance.outcomes import NotRun
from core_rl_oracle.tolerance import Tolerance

__all__ = ["PairFinding", "pair_named", "pair_scalars", "pair_tokens", "partners_part", "verify_pair"]


@dataclass(frozen=True, kw_only=True)
class PairFinding:
    """One quantity of two engines: compared with each other, and each with the oracle."""

    between: Finding
    own: Finding
    partner: Finding


def pair_tokens(
    label: str,
    ours: Sequence[Tensor],
    partner: Sequence[Tensor],
    expected: ExpectedOutputs,
    places: Places | None = None,
) -> PairFinding:
    """A token output ``[L]`` of each sequence; ``places`` of the tokens, for the hints."""
    truth, allowed = expected.values, expected.tolerance
    return PairFinding(
        between=compare_tokens(_between(label), ours, partner, allowed + allowed),
        own=compare_tokens(label, ours, truth, allowed, places),
        partner=compare_tokens(label, partner, truth, allowed),
    )


def pair_scalars(label: str, ours: float, partner: float, truth: float, allowed: Tolerance) -> PairFinding:
    """A number."""
    return PairFinding(
        between=compare_scalar(_between(label), ours, partner, allowed + allowed),
        own=compare_scalar(label, ours, truth, allowed),
        partner=compare_scalar(label, partner, truth, allowed),
    )


def pair_named(
    label: str,
    ours: Mapping[str, Tensor],
    partner: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    allowed: Mapping[str, Tolerance],
    since: Mapping[str, Tensor] | None = None,
) -> PairFinding:
    """Tensors by name; ``since`` holds their values before training, for the hints."""
    # Over the oracle's names: of other ones there is no tolerance, and it is they that are wrong.
    present = {name: partner[name] for name in truth if name in partner}
    together = {name: tolerance + tolerance for name, tolerance in allowed.items()}
    return PairFinding(
        between=compare_named(_between(label), ours, present, together),
        own=compare_named(label, ours, truth, allowed, since=since),
        partner=compare_named(label, partner, truth, allowed),
    )


def _between(label: str) -> str:
    return f"{label} compared with the other engine"


def verify_pair(subject: EngineUnderTest, quantities: Sequence[PairFinding]) -> None:
    """Require that two engines agree in ``quantities``, in the order in which they arise.

    Where they do not, and the engine under check is off the oracle, this raises `AssertionError`; where only
    the partner is, `NotRun`: it is the case from the other side that fails.
    """
    __tracebackhide__ = True
    differences = [quantity for quantity in quantities if quantity.between.problem is not None]
    if not differences:
        for quantity in quantities:
            subject.verify(quantity.between)
        return
    off = next((quantity for quantity in quantities if quantity.own.problem is not None), None)
    blamed = next((quantity.partner for quantity in quantities if quantity.partner.problem is not None), None)
    if off is None and blamed is not None:
        raise NotRun(
            f"the partner {subject.peer.spec.name!r} is off the oracle: {_by(blamed)}; {subject.spec.name!r} is not"
        )
    # Either engine is off by the triangle inequality, unless their names or shapes differ.
    finding = differences[0].between if off is None else off.own
    problem = "\n".join([*_verdict(subject, differences[0].between, off, blamed), str(finding.problem)])
    subject.verify(Finding(what=finding.what, error=finding.error, limit=finding.limit, problem=problem))


def _verdict(
    subject: EngineUnderTest, between: Finding, off: PairFinding | None, blamed: Finding | None
) -> Iterator[str]:
    """The difference between the two engines, and the one to fix."""
    ours, partner = subject.spec.name, subject.peer.spec.name
    yield f"{ours!r} and {partner!r} differ: {_by(between)}"
    if off is not None:
        yield f"{ours!r} is off the oracle: {_by(off.own)}"
        if blamed is None:
            yield f"{partner!r} is within its tolerance: {_by(off.partner)}; fix {ours!r}"
        else:
            yield f"{partner!r} is off as well: {_by(blamed)}; fix both"


def _by(finding: Finding) -> str:
    return f"{finding.what} by {finding.error:.1e} (allowed {finding.limit:.1e})"


@contextmanager
def partners_part(subject: EngineUnderTest) -> Iterator[None]:
    """Context for the partner's work: where it fails, this raises `NotRun` with the partner's name."""
    try:
        yield
    except AssertionError as error:
        raise NotRun(f"the partner {subject.peer.spec.name!r} is wrong: {_gist(error)}") from error
    except CoreRLError as error:
        subject.expected.discard(subject.peer.spec.name)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise NotRun(f"the partner {subject.peer.spec.name!r} failed: {reason}") from error


def _gist(error: AssertionError) -> str:
    """The line below the place."""
    lines = str(error).splitlines()
    return lines[min(1, len(lines) - 1)].strip() if lines else "AssertionError"
