"""Findings of comparisons with the oracle, with reproductions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from core_rl_conformance.case import Case
from core_rl_conformance.expected_values import ExpectedGradients
from core_rl_conformance.hints.diagnose import Explain, Finding, compare_scalar
from core_rl_conformance.reproduction import Computation, Weights, reproduction
from core_rl_oracle.tolerance import EXACT, Tolerance


def reproduced(
    case: Case,
    finding: Finding,
    computation: Computation | None,
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerances: Mapping[str, Tolerance],
    note: str = "",
) -> Finding:
    """``finding``, with a script of ``computation`` where values are wrong; ``note`` goes into its heading."""
    if finding.problem is None or computation is None:
        return finding
    engine = f"{case.target.noun} {case.target.spec.name!r}, {case.setting}, {case.dtype}"
    heading = (
        f"{case.check.identifier}: {'; '.join(finding.problem.splitlines()[:2])}",
        f"Values in float64, and some of {engine}{note}.",
    )
    return replace(finding, reproduction=reproduction(computation, heading, got, expected, tolerances))


def reproduced_tokens(
    case: Case,
    finding: Finding,
    computation: Computation | None,
    got: Sequence[Tensor],
    expected: Sequence[Tensor],
    tolerance: Tolerance,
    note: str = "",
) -> Finding:
    """The same of an output of each sequence."""
    names = [f"sequence {number}" for number in range(len(got))]
    left, right = (dict(zip(names, values, strict=True)) for values in (got, expected))
    return reproduced(case, finding, computation, left, right, dict.fromkeys(names, tolerance), note)


def weights_finding(
    case: Case,
    finding: Finding,
    of: Computation | None,
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
) -> Finding:
    """The same of weights; without a script where ``of`` has names and shapes alone and values are wrong."""
    shapes_only = of is not None and isinstance(of.quantity, Weights) and of.quantity.shapes_only
    if shapes_only and math.isfinite(finding.error):
        return finding
    exact = dict.fromkeys(expected, EXACT)
    return reproduced(case, finding, of, got, expected, exact)


def scalar_finding(
    case: Case,
    name: Literal["loss", "norm"],
    label: str,
    got: float,
    expected: ExpectedGradients,
    explain: Explain | None = None,
    note: str = "",
) -> Finding:
    """Comparison of a loss, or of a norm of gradients, with the oracle's."""
    truth = expected.oracle.loss if name == "loss" else expected.oracle.norm
    allowed = expected.loss if name == "loss" else expected.norm
    finding = compare_scalar(label, got, truth, allowed, explain=explain)
    left, right = torch.tensor(got), torch.tensor(truth)
    return reproduced(case, finding, expected.computation, {name: left}, {name: right}, {name: allowed}, note)
