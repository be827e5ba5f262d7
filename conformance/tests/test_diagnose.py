"""Messages point at the cause: the first difference, and the shape of the error."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from core_rl_conformance.diagnose import compare_named, compare_scalar, compare_tokens, same_named
from core_rl_conformance.tolerance import Tolerance

SMALL = Tolerance(baseline=1e-6, floor=1e-6)
EXPECTED = [torch.randn(length, generator=torch.Generator().manual_seed(length)) for length in (7, 4, 9)]
MASKS = [torch.arange(len(value)) >= 3 for value in EXPECTED]


def _late(value: Tensor) -> Tensor:
    return torch.cat([value[:1], value[:-1]])


def _early(value: Tensor) -> Tensor:
    return torch.cat([value[1:], value[-1:]])


def _first_off(value: Tensor) -> Tensor:
    return torch.cat([value[:1] + 1, value[1:]])


def _last_off(value: Tensor) -> Tensor:
    return torch.cat([value[:-1], value[-1:] + 1])


def _prompt_off(value: Tensor) -> Tensor:
    return torch.where(torch.arange(len(value)) < 3, value + 0.5, value)


SHAPES = {
    "one position too late": _late,
    "one position too early": _early,
    r"multiplied by 0\.25": lambda value: 0.25 * value,
    r"multiplied by -1": lambda value: -value,
    "only the first token": _first_off,
    "only the last token": _last_off,
    "only tokens that are not trained": _prompt_off,
}


@pytest.mark.parametrize("hint", SHAPES)
def test_known_shapes_of_token_errors_are_named(hint: str) -> None:
    finding = compare_tokens("values", [SHAPES[hint](value) for value in EXPECTED], EXPECTED, SMALL, MASKS)
    assert finding.problem is not None
    assert torch.tensor(finding.error) > SMALL.limit
    assert _found(hint, finding.problem), finding.problem
    others = [other for other in SHAPES if other != hint and _found(other, finding.problem)]
    # The first token of a prompt is not trained either.
    assert not others or hint == "only the first token"


def _found(pattern: str, text: str) -> bool:
    return re.search(pattern + r"\b", text) is not None


def test_first_difference_is_shown_with_its_place() -> None:
    got = [value.clone() for value in EXPECTED]
    got[1][2] += 0.5
    problem = compare_tokens("log-probs", got, EXPECTED, SMALL).problem
    assert problem is not None
    assert "sequence 1, token 2 of 4" in problem
    assert f"expected {float(EXPECTED[1][2]):.7g}, got {float(got[1][2]):.7g}" in problem
    assert "1 of 20 values are off" in problem


def test_neighbours_are_suspected_when_the_first_sequence_is_right() -> None:
    got = [EXPECTED[0], *(value + torch.randn(len(value)) for value in EXPECTED[1:])]
    problem = compare_tokens("log-probs", got, EXPECTED, SMALL).problem
    assert problem is not None and "packed neighbours" in problem


def test_scalars_of_sequences_are_compared() -> None:
    expected = [torch.tensor(1.0), torch.tensor(2.0)]
    problem = compare_tokens("scores", [torch.tensor(1.0), torch.tensor(2.5)], expected, SMALL).problem
    assert problem is not None and "first at sequence 1: expected 2, got 2.5" in problem


def test_shapes_are_compared_first() -> None:
    finding = compare_tokens("log-probs", [torch.zeros(3)], [torch.zeros(4)], SMALL)
    assert finding.error == math.inf
    assert finding.problem == "log-probs of sequence 0 has shape [3]; expected [4]"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_passes(bad: float) -> None:
    got = [value.clone() for value in EXPECTED]
    got[2][4] = bad
    finding = compare_tokens("log-probs", got, EXPECTED, Tolerance(baseline=1e30, floor=0.0))
    assert finding.problem is not None
    assert "sequence 2, token 4" in finding.problem
    assert compare_scalar("loss", bad, 1.0, SMALL).problem is not None


def test_equal_values_pass() -> None:
    assert compare_tokens("log-probs", EXPECTED, EXPECTED, SMALL).problem is None
    assert compare_scalar("loss", 1.0, 1.0 + 1e-7, SMALL).problem is None


# -------------------------------------------------------------- named tensors

NAMED = {"matrix": torch.randn(3, 4), "other": torch.randn(4, 4), "norm": torch.randn(4)}
LIMITS = dict.fromkeys(NAMED, SMALL)


def _compare(got: dict[str, Tensor]) -> str:
    problem = compare_named("gradients", got, NAMED, LIMITS).problem
    assert problem is not None
    return problem


def test_a_common_factor_of_all_tensors_is_named() -> None:
    problem = _compare({name: 0.5 * value for name, value in NAMED.items()})
    assert "3 of 3 tensors differ" in problem
    assert "all of them are multiplied by 0.5" in problem


def test_zeros_vectors_and_lists_are_named() -> None:
    assert "all zero (1 of 3)" in _compare({**NAMED, "matrix": torch.zeros(3, 4)})
    assert "only vectors" in _compare({**NAMED, "norm": NAMED["norm"] + torch.randn(4)})
    assert "wrong: matrix" in _compare({**NAMED, "matrix": torch.randn(3, 4)})


def test_names_and_shapes_are_compared_first() -> None:
    got = {"matrix": torch.zeros(4, 3), "norm": NAMED["norm"], "lm_head": torch.zeros(1)}
    problem = _compare(got)
    assert "missing: other" in problem
    assert "lm_head" in problem and "tied" in problem
    assert "matrix is [4, 3]; expected [3, 4]" in problem


def test_bitwise_comparison_sees_one_unit_in_the_last_place_and_the_dtype() -> None:
    moved = {**NAMED, "norm": torch.nextafter(NAMED["norm"], torch.tensor(math.inf))}
    assert same_named("weights", NAMED, NAMED).problem is None
    assert same_named("weights", moved, NAMED).problem is not None
    halved = {name: value.bfloat16().float() if name == "norm" else value for name, value in NAMED.items()}
    assert same_named("weights", halved, NAMED).problem is not None
    problem = same_named("weights", {**NAMED, "norm": NAMED["norm"].double()}, NAMED).problem
    assert problem is not None and "float64; expected torch.float32" in problem


def test_scalars_show_their_ratio() -> None:
    problem = compare_scalar("the norm", 3.0, 1.5, SMALL).problem
    assert problem is not None and "2 times what is expected" in problem
