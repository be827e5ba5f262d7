"""Runs of checks on mutants, and the checks that fit one."""

from __future__ import annotations

from pathlib import Path

from core_rl.errors import CoreRLError
from core_rl.reference import ROLLOUT_SPEC
from core_rl.reference import SPEC as REFERENCE
from core_rl.registry.spec import EngineKind, EngineSpec
from core_rl_conformance.case import takes
from core_rl_conformance.catalogue import Check, load_checks
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.outcomes import NotRun
from mutants.zoo import Mutant, run_check

PARTNERS: dict[EngineKind, EngineSpec] = {"train": REFERENCE, "inference": ROLLOUT_SPEC}
"""A correct engine of each kind, for checks of pairs."""


def attack(
    expected_values: ExpectedValues, mutant: Mutant, check: Check, seed: int, directory: Path
) -> str | None:
    """Run ``check`` on ``mutant`` and return its failure message; None if it passes or does not run."""
    spec = mutant.spec
    expected_values.groups.timeout_s = mutant.timeout_s
    try:
        run_check(
            expected_values,
            check.identifier,
            spec,
            layout=mutant.layout,
            family=mutant.family,
            directory=directory,
            seed=seed,
            dtype=mutant.dtype,
            partner=partner_of(check, mutant.partner),
        )
    except NotRun:
        return None
    except (AssertionError, CoreRLError) as error:
        return str(error)
    finally:
        expected_values.discard(spec.name)
    return None


def partner_of(check: Check, preferred: EngineSpec | None = None) -> EngineSpec | None:
    """The correct partner engine that ``check`` compares with, if it needs one."""
    if check.partner is None:
        return None
    suited = preferred is not None and preferred.kind == check.partner
    return preferred if suited else PARTNERS[check.partner]


def fits(check: Check, spec: EngineSpec, dp: int, family: str) -> bool:
    """Whether ``check`` can be asked of an engine with ``spec``, here."""
    partner = partner_of(check)
    return (
        check.kind == spec.kind
        and check.requires <= spec.capabilities
        and (partner is None or check.partner_requires <= partner.capabilities)
        and check.min_dp <= dp
        and takes(check, family)
    )


def other_checks(mutant: Mutant) -> list[Check]:
    """The checks that fit ``mutant``, without its intended check."""
    return [
        check
        for identifier, check in load_checks().items()
        if identifier != mutant.killed_by and fits(check, mutant.spec, mutant.layout.dp, mutant.family)
    ]
