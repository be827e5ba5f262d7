"""Comparisons that say where the first difference is and what kind of mistake it looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core_rl_conformance.tolerance import SignedMean, Tolerance, largest_difference

__all__ = [
    "Finding",
    "compare_named",
    "compare_scalar",
    "compare_signed_mean",
    "compare_tokens",
    "same_named",
]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one comparison."""

    what: str
    error: float
    limit: float
    problem: str | None = None
    """What to tell the engine's author; None where the comparison holds."""


# ------------------------------------------------------------------- tokens


def compare_tokens(
    what: str,
    got: Sequence[Tensor],
    expected: Sequence[Tensor],
    tolerance: Tolerance,
    masks: Sequence[Tensor] | None = None,
) -> Finding:
    """Compare one tensor ``[L]`` for each sequence; ``masks`` tell which tokens are trained, for the hint."""
    for index, (left, right) in enumerate(zip(got, expected, strict=True)):
        if left.shape != right.shape:
            problem = f"{what} of sequence {index} has shape {list(left.shape)}; expected {list(right.shape)}"
            return Finding(what=what, error=float("inf"), limit=tolerance.limit, problem=problem)
    errors = [largest_difference(left, right) for left, right in zip(got, expected, strict=True)]
    error = max(errors, default=0.0)
    if tolerance.allows(error):
        return Finding(what=what, error=error, limit=tolerance.limit)
    lines = [f"{what} differs by {error:.3e}; allowed {tolerance}", _first_token(got, expected, tolerance)]
    lines += token_hints(got, expected, tolerance, masks)
    return Finding(what=what, error=error, limit=tolerance.limit, problem="\n".join(lines))


def _wrong(left: Tensor, right: Tensor, tolerance: Tolerance) -> Tensor:
    """Bool: where the difference is too large, or not a number."""
    return ~((left.double() - right.double()).abs() <= tolerance.limit)


def _first_token(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: Tolerance) -> str:
    wrong = [_wrong(left, right, tolerance) for left, right in zip(got, expected, strict=True)]
    sequence = next(index for index, mask in enumerate(wrong) if mask.any())
    left, right, place = got[sequence], expected[sequence], f"sequence {sequence}"
    if left.dim():
        token = int(wrong[sequence].nonzero()[0][0])
        left, right, place = left[token], right[token], f"{place}, token {token} of {len(left)}"
    count, total = sum(int(mask.sum()) for mask in wrong), sum(mask.numel() for mask in wrong)
    return (
        f"first at {place}: expected {_shown(right)}, got {_shown(left)}; {count} of {total} values are off"
    )


def _shown(value: Tensor) -> str:
    return f"{float(value):.7g}" if value.numel() == 1 else f"a row of {value.numel()} values"


def token_hints(
    got: Sequence[Tensor],
    expected: Sequence[Tensor],
    tolerance: Tolerance,
    masks: Sequence[Tensor] | None = None,
) -> list[str]:
    """Known shapes of error, each as one line."""
    hints = []
    for shift, place in ((1, "too late"), (-1, "too early")):
        if _agrees_shifted(got, expected, shift, tolerance):
            hints.append(
                f"it looks like: every value stands one position {place}; a value at t belongs to token t"
            )
    factor = constant_factor(_flat(got), _flat(expected), tolerance)
    if factor is not None:
        hints.append(f"it looks like: everything is multiplied by {factor:.6g}")
    wrong = [_wrong(left, right, tolerance) for left, right in zip(got, expected, strict=True)]
    if masks is not None and all(not (bad & mask).any() for bad, mask in zip(wrong, masks, strict=True)):
        hints.append("only tokens that are not trained (loss_mask 0) are wrong")
    edges = {"first": 0, "last": -1}
    for edge, index in edges.items():
        if all(int(bad.sum()) == int(bad[index].sum()) for bad in wrong if bad.dim()):
            hints.append(f"only the {edge} token of a sequence is wrong")
    sizes = [bool(bad.any()) for bad in wrong]
    if not sizes[0] and sum(sizes) > len(sizes) // 2:
        hints.append(
            "the first sequence is right and later ones are not: do sequences see their packed neighbours?"
        )
    return hints


def _agrees_shifted(
    got: Sequence[Tensor], expected: Sequence[Tensor], shift: int, tolerance: Tolerance
) -> bool:
    """Whether ``got[t] = expected[t - shift]`` in all sequences of more than two tokens."""
    pairs = [(left, right) for left, right in zip(got, expected, strict=True) if left.dim() and len(left) > 2]
    parts = [(left[1:], right[:-1]) if shift > 0 else (left[:-1], right[1:]) for left, right in pairs]
    return bool(parts) and all(tolerance.allows(largest_difference(left, right)) for left, right in parts)


def _flat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values])


def constant_factor(got: Tensor, expected: Tensor, tolerance: Tolerance) -> float | None:
    """The number that ``expected`` was multiplied by, if there is one other than 1 (up to 0.1 %)."""
    got, expected = got.detach().double(), expected.detach().double()
    large = expected.abs() > max(
        100 * tolerance.limit, 1e-3 * float(expected.abs().max()) if expected.numel() else 0.0
    )
    if not large.any() or not torch.isfinite(got).all():
        return None
    ratios = got[large] / expected[large]
    middle = float(ratios.median())
    constant = float((ratios - middle).abs().max()) <= 1e-3 * abs(middle)
    return middle if constant and abs(middle - 1) > 1e-6 and middle != 0 else None


# -------------------------------------------------------------- named tensors


def compare_named(
    what: str,
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerances: Mapping[str, Tolerance],
) -> Finding:
    """Compare tensors by name, each with its own tolerance; reports the one that is worst in relation to it."""
    problem = _names_problem(what, got, expected)
    if problem is not None:
        return Finding(what=what, error=float("inf"), limit=0.0, problem=problem)
    errors = {name: largest_difference(got[name], value) for name, value in expected.items()}
    worst = max(errors, key=lambda name: errors[name] / max(tolerances[name].limit, 1e-300))
    wrong = [name for name, error in errors.items() if not tolerances[name].allows(error)]
    if not wrong:
        return Finding(what=what, error=errors[worst], limit=tolerances[worst].limit)
    lines = [
        f"{what}: {len(wrong)} of {len(expected)} tensors differ",
        *(_tensor_line("first", wrong[0], got, expected, tolerances),),
        *(() if worst == wrong[0] else (_tensor_line("worst", worst, got, expected, tolerances),)),
        *_named_hints(wrong, got, expected, tolerances),
    ]
    return Finding(what=what, error=errors[worst], limit=tolerances[worst].limit, problem="\n".join(lines))


def same_named(what: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Finding:
    """Compare tensors by name, bit for bit."""
    exact = {name: Tolerance(baseline=0.0, floor=0.0) for name in expected}
    dtypes = [name for name in expected if name in got and got[name].dtype != expected[name].dtype]
    if dtypes:
        name = dtypes[0]
        problem = f"{what}: {name} is {got[name].dtype}; expected {expected[name].dtype}"
        return Finding(what=what, error=float("inf"), limit=0.0, problem=problem)
    return compare_named(what, got, expected, exact)


def _names_problem(what: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    missing, extra = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
    shapes = [name for name in expected if name in got and got[name].shape != expected[name].shape]
    lines = [f"missing: {', '.join(missing[:5])}"] * bool(missing)
    lines += [f"unexpected (a tied tensor comes once): {', '.join(extra[:5])}"] * bool(extra)
    lines += [
        f"{name} is {list(got[name].shape)}; expected {list(expected[name].shape)}" for name in shapes[:3]
    ]
    return f"{what}: the tensors have other names or shapes\n" + "\n".join(lines) if lines else None


def _tensor_line(
    label: str,
    name: str,
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerances: Mapping[str, Tolerance],
) -> str:
    difference = (got[name].double() - expected[name].double()).abs().nan_to_num(nan=float("inf")).flatten()
    place = int(difference.argmax())
    left, right = got[name].flatten()[place], expected[name].flatten()[place]
    return (
        f"{label}: {name} {list(expected[name].shape)} by {float(difference[place]):.3e}, allowed {tolerances[name]}; "
        f"expected {float(right):.7g}, got {float(left):.7g}"
    )


def _named_hints(
    wrong: Sequence[str],
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerances: Mapping[str, Tolerance],
) -> list[str]:
    hints = []
    factors = {constant_factor(got[name], expected[name], tolerances[name]) for name in wrong}
    known = [factor for factor in factors if factor is not None]
    if known and None not in factors and max(known) - min(known) <= 2e-3 * abs(max(known, key=abs)):
        hints.append(f"it looks like: all of them are multiplied by {known[0]:.6g}")
    if all(not got[name].any() for name in wrong):
        hints.append(f"it looks like: they are all zero ({len(wrong)} of {len(expected)})")
    if all(expected[name].dim() < 2 for name in wrong):
        hints.append("only vectors (norms, biases) are wrong, which layouts replicate")
    elif len(wrong) < len(expected):
        hints.append("wrong: " + ", ".join(wrong[:6]) + (", ..." if len(wrong) > 6 else ""))
    return hints


# ------------------------------------------------------------------- scalars


def compare_scalar(what: str, got: float, expected: float, tolerance: Tolerance) -> Finding:
    """Compare two numbers."""
    error = largest_difference(
        torch.tensor(got, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    )
    if tolerance.allows(error):
        return Finding(what=what, error=error, limit=tolerance.limit)
    problem = f"{what} is {got:.9g}; expected {expected:.9g}; they differ by {error:.3e}, allowed {tolerance}"
    if expected:
        problem += f"\nit is {got / expected:.6g} times what is expected"
    return Finding(what=what, error=error, limit=tolerance.limit, problem=problem)


def compare_signed_mean(what: str, mean: SignedMean) -> Finding:
    """Report a mean error that points one way."""
    problem = None
    if not mean.passes:
        problem = (
            f"the mean error of {what} is {mean.mean:+.3e}, and chance explains {mean.limit:.1e}: "
            "small, but always in one direction"
        )
    return Finding(what=f"mean error of {what}", error=abs(mean.mean), limit=mean.limit, problem=problem)
