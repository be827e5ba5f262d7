"""Comparisons that show the first difference and the kind of mistake it looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from core_rl_conformance.hints.tensor_shapes import Named, named_hints
from core_rl_conformance.hints.token_shapes import token_hints
from core_rl_conformance.hints.tokens import LOOKS_LIKE, Places, Tokens, named_factor
from core_rl_oracle.oracle import Gradients
from core_rl_oracle.tolerance import EXACT, Tolerance, largest_difference

NEAR = 3.0
"""Times the limit."""
UNKNOWN = "no known cause fits these values"
Explain = Callable[[], str | None]
"""Finds out what explains a difference, where that needs more than the values; asked only about wrong ones."""
MOST_POINTS = 100
"""A finding keeps no more of the compared values."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one comparison."""

    what: str
    error: float
    limit: float
    problem: str | None = None
    """Message for the engine's author; None where the comparison holds."""
    points: tuple[tuple[float, float], ...] = ()
    """Some of the compared values as (got, expected)."""
    names_cause: bool = False
    """The problem names its cause, by evidence."""
    reproduction: str = ""
    """A script that computes the expected values without core-rl; empty without one."""

    @property
    def cause(self) -> str | None:
        """The cause that the problem names, or None."""
        lines = (self.problem or "").splitlines()
        return next((line.removeprefix(LOOKS_LIKE) for line in lines if line.startswith(LOOKS_LIKE)), None)

    @property
    def message(self) -> str:
        """The problem, which is called unknown where nothing explains it."""
        known = self.names_cause or self.cause is not None
        near = 0 < self.error < NEAR * self.limit
        size = [f"this is {self.error / self.limit:.1f} times the limit"] if near else []
        return "\n".join([self.problem or "", *(() if known else (*size, UNKNOWN))])


# ------------------------------------------------------------------- tokens


def compare_tokens(
    label: str,
    got: Sequence[Tensor],
    expected: Sequence[Tensor],
    tolerance: Tolerance,
    places: Places | None = None,
    *,
    keep_points: bool = False,
    explain: Explain | None = None,
    within: str = "",
    prompts: Sequence[int] = (),
) -> Finding:
    """Compare one tensor ``[L]`` for each sequence; ``places`` are positions of the tokens, for the hints.

    ``within`` begins the place of the first wrong token. ``prompts`` are numbers of tokens before each sequence's.

    With ``keep_points`` the finding holds some of the values, for a plot. What ``explain`` finds replaces the hints.
    """
    for index, (left, right) in enumerate(zip(got, expected, strict=True)):
        if left.shape != right.shape:
            problem = (
                f"{label} of sequence {index} has shape {list(left.shape)}; expected {list(right.shape)}"
            )
            return Finding(
                what=label, error=float("inf"), limit=tolerance.limit, problem=problem, names_cause=True
            )
    errors = [largest_difference(left, right) for left, right in zip(got, expected, strict=True)]
    error = max(errors, default=0.0)
    points = _some_points(got, expected) if keep_points else ()
    finding = Finding(what=label, error=error, limit=tolerance.limit, points=points)
    if tolerance.allows(error):
        return finding
    tokens = Tokens.of(got, expected, tolerance, places)
    head = [f"{label} differs by {error:.3e}; allowed {tolerance}", _first_wrong(tokens, within, prompts)]
    return _with_hints(finding, head, token_hints(tokens, _explained(explain)))


def _explained(explain: Explain | None) -> list[str]:
    explanation = None if explain is None else explain()
    return [] if explanation is None else [LOOKS_LIKE + explanation]


def _with_hints(finding: Finding, head: Sequence[str], hints: Sequence[str]) -> Finding:
    known = any(hint.startswith(LOOKS_LIKE) for hint in hints)
    return replace(finding, problem="\n".join([*head, *hints]), names_cause=known)


def _first_wrong(tokens: Tokens, within: str, prompts: Sequence[int]) -> str:
    first = int(tokens.wrong.nonzero()[0][0])
    sequence, position = int(tokens.sequence[first]), int(tokens.position[first])
    place = f"{within}sequence {sequence}"
    if not tokens.scalars:
        place += f", token {position} of {tokens.lengths[sequence]}"
    if prompts:
        place += f" after a prompt of {prompts[sequence]}"
    count, total = int(tokens.wrong.sum()), len(tokens.wrong)
    expected, got = tokens.expected[first].flatten(), tokens.got[first].flatten()
    at = int((got - expected).abs().argmax())
    entry = f" in entry {at} of {len(got)}" * (len(got) > 1)
    values = f"expected {float(expected[at]):.7g}, got {float(got[at]):.7g}{entry}"
    return f"first at {place}: {values}; {count} of {total} values are off"


def _some_points(got: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[tuple[float, float], ...]:
    """Pairs (got, expected), evenly taken, and the worst one; first tokens, which are 0, left out."""
    left = torch.cat([value[1:] for value in got]).double()
    right = torch.cat([value[1:] for value in expected]).double()
    if not len(left):
        return ()
    worst = int((left - right).abs().nan_to_num(nan=float("inf")).argmax())
    indices = sorted({*range(0, len(left), -(-len(left) // (MOST_POINTS - 1))), worst})
    # Nine digits are all that a float32 has.
    return tuple((float(f"{float(left[i]):.9g}"), float(f"{float(right[i]):.12g}")) for i in indices)


# -------------------------------------------------------------- named tensors


def compare_named(
    label: str,
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    tolerances: Mapping[str, Tolerance],
    since: Mapping[str, Tensor] | None = None,
    *,
    explain: Explain | None = None,
) -> Finding:
    """Compare tensors by name, each with its own tolerance; reports the worst in relation to it.

    ``since`` are the tensors before the checked change: then hints speak of the change. What ``explain``
    finds replaces the hints.
    """
    problem = _names_problem(label, got, expected)
    if problem is not None:
        return Finding(what=label, error=float("inf"), limit=0.0, problem=problem, names_cause=True)
    errors = {name: largest_difference(got[name], value) for name, value in expected.items()}
    worst = max(errors, key=lambda name: errors[name] / max(tolerances[name].limit, 1e-300))
    wrong = [name for name, error in errors.items() if not tolerances[name].allows(error)]
    finding = Finding(what=label, error=errors[worst], limit=tolerances[worst].limit)
    if not wrong:
        return finding
    comparison = Named(got=got, expected=expected, tolerances=tolerances, wrong=wrong)
    head = [
        f"{label}: {len(wrong)} of {len(expected)} tensors differ",
        _tensor_line("first", wrong[0], got, expected, tolerances),
        *(() if worst == wrong[0] else (_tensor_line("worst", worst, got, expected, tolerances),)),
    ]
    return _with_hints(finding, head, _explained(explain) or named_hints(comparison, since))


def same_named(
    label: str,
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    since: Mapping[str, Tensor] | None = None,
) -> Finding:
    """Compare tensors by name, bit for bit; ``since`` as for `compare_named`."""
    exact = dict.fromkeys(expected, EXACT)
    dtypes = [name for name in expected if name in got and got[name].dtype != expected[name].dtype]
    if dtypes:
        name = dtypes[0]
        problem = f"{label}: {name} is {got[name].dtype}; expected {expected[name].dtype}"
        return Finding(what=label, error=float("inf"), limit=0.0, problem=problem, names_cause=True)
    return compare_named(label, got, expected, exact, since)


def _names_problem(label: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    missing, extra = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
    shapes = [name for name in expected if name in got and got[name].shape != expected[name].shape]
    lines = [f"missing: {', '.join(missing[:5])}"] * bool(missing)
    lines += [f"unexpected (a tied tensor comes once): {', '.join(extra[:5])}"] * bool(extra)
    lines += [
        f"{name} is {list(got[name].shape)}; expected {list(expected[name].shape)}" for name in shapes[:3]
    ]
    return f"{label}: the tensors have other names or shapes\n" + "\n".join(lines) if lines else None


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


# ------------------------------------------------------------------- scalars


def compare_scalar(
    label: str, got: float, expected: float, tolerance: Tolerance, *, explain: Explain | None = None
) -> Finding:
    """Compare two numbers. Any two have a ratio: it is named where it is a fraction of small numbers, or its root."""
    error = largest_difference(
        torch.tensor(got, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    )
    finding = Finding(what=label, error=error, limit=tolerance.limit)
    if tolerance.allows(error):
        return finding
    head = f"{label} is {got:.9g}; expected {expected:.9g}; they differ by {error:.3e}, allowed {tolerance}"
    factor = named_factor(got / expected) if expected else None
    hints = [] if factor is None else [f"{LOOKS_LIKE}{factor} times what is expected"]
    return _with_hints(finding, [head], _explained(explain) or hints)


def compare_mean_square(label: str, error: float, tolerance: Tolerance) -> Finding:
    """Report errors that pass one by one and are too large on the whole."""
    name = f"root mean square error of {label}"
    reason = "no single value is far off, and all of them together are"
    problem = f"the {name} is {error:.3e}; allowed {tolerance}: {reason}"
    return _on_the_whole(name, error, tolerance.limit, problem)


def compare_signed_mean(label: str, mean: float, limit: float) -> Finding:
    """Report a mean error that points one way."""
    name = f"mean error of {label}"
    problem = (
        f"the {name} is {mean:+.3e}, and chance explains {limit:.3e}: small, but always in one direction"
    )
    return _on_the_whole(name, abs(mean), limit, problem)


def _on_the_whole(name: str, error: float, limit: float, problem: str) -> Finding:
    wrong = None if error <= limit else problem
    return Finding(what=name, error=error, limit=limit, problem=wrong, names_cause=True)


Mistakes = Callable[[], Iterator[tuple[str, Gradients]]]
"""Sentences about known mistakes, and the loss and gradients that each would give."""
Shares = Callable[[], Iterator[tuple[str, Mapping[str, Tensor]]]]
"""Labels of parts of a batch, and the part of the gradients that each adds."""
SAMPLED, MOST_ROWS = 1000, 4
"""Compared entries of a tensor, and rows that a sentence names."""
EQUATIONS = 8
"""Entries for each sequence, so that a fit is no accident."""
Again = Callable[[], tuple[float, Mapping[str, Tensor]]]
"""The same pass once more: its loss, and its gradients by name."""
EXPLAINED = 4.0
"""Times the tolerance of the right values, without a mistake."""
UNEXPLAINED = 0.1
"""The part of an error that a mistake may leave: small errors are near many mistakes."""


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
    near = EXPLAINED * tolerance.limit
    return next((sentence for sentence, wrong in mistakes() if _fits(got, expected, wrong, near)), None)


def explain_loss(
    got: float, expected: float, tolerance: Tolerance, mistakes: Mistakes, again: Again | None
) -> str | None:
    """The same for the loss of a pass."""
    if again is not None and not abs((second := again()[0]) - got) <= tolerance.limit:
        return _not_deterministic(abs(second - got))
    near = min(EXPLAINED * tolerance.limit, UNEXPLAINED * abs(got - expected))
    return next((sentence for sentence, wrong in mistakes() if abs(wrong.loss - got) <= near), None)


def explain_named(
    got: Mapping[str, Tensor],
    tolerances: Mapping[str, Tolerance],
    mistakes: Mistakes,
    again: Again | None,
    shares: Shares = lambda: iter(()),
) -> str | None:
    """The same for gradients by name, which are sums of the ``shares`` of single sequences."""
    if again is not None:
        second = again()[1]
        moved = {
            name: largest_difference(value, second[name]) for name, value in got.items() if name in second
        }
        worst = max(moved, key=lambda name: moved[name] / max(tolerances[name].limit, 1e-300), default=None)
        if worst is not None and not moved[worst] <= tolerances[worst].limit:
            return _not_deterministic(moved[worst])
    known = explain_tensors(got, tolerances, ((sentence, wrong.grads) for sentence, wrong in mistakes()))
    return known or _explain_shares(got, tolerances, shares)


def _explain_shares(
    got: Mapping[str, Tensor], tolerances: Mapping[str, Tolerance], shares: Shares
) -> str | None:
    """How often sequences count, where the wrong gradients ``got`` are a sum of their ``shares``."""
    samples = ((label, _sample(share, got)) for label, share in shares() if got.keys() <= share.keys())
    columns = {label: column for label, column in samples if column.any()}
    values = _sample(got, got)
    if not columns or len(values) < EQUATIONS * len(columns):
        return None
    matrix = torch.stack(list(columns.values()), 1)
    limits = {name: torch.full_like(value, tolerances[name].limit) for name, value in got.items()}
    near = EXPLAINED * _sample(limits, got)
    fitting = (c for c in _counts(matrix, values) if bool(((matrix @ c - values).abs() <= near).all()))
    if (counts := next(fitting, None)) is None:
        return None
    groups: dict[str, list[str]] = {}
    for label, count in zip(columns, counts.tolist(), strict=True):
        groups.setdefault(f"{round(count, 3) + 0.0:g}", []).append(label)
    sentences = [
        f"{', '.join(rows[:MOST_ROWS])}{', ...' * (len(rows) > MOST_ROWS)} count {count} times"
        for count, rows in groups.items()
        if count != "1"
    ]
    return f"gradients in which sequences {'; '.join(sentences[:MOST_ROWS])}" if len(groups) > 1 else None


def _counts(matrix: Tensor, values: Tensor) -> Iterator[Tensor]:
    """Counts of each column that may give ``values``: all 1 but for a single one, and then any.

    Columns that are multiples of each other, as of equal sequences, leave no single answer for all.
    """
    factors = matrix.T @ (values - matrix.sum(1)) / matrix.square().sum(0)
    for index in (factors - factors.round()).abs().argsort():
        yield 1 + factors * torch.nn.functional.one_hot(index, len(factors))
    solved = torch.linalg.lstsq(matrix, values, driver="gelsd")
    if int(solved.rank) == len(factors):
        yield solved.solution


def _sample(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Some entries of each of the tensors ``names``, float64."""
    flat = [tensors[name].detach().double().flatten() for name in names]
    return torch.cat([value[:: -(-len(value) // SAMPLED)] for value in flat])


def explain_tensors(
    got: Mapping[str, Tensor],
    tolerances: Mapping[str, Tolerance],
    mistakes: Iterable[tuple[str, Mapping[str, Tensor]]],
) -> str | None:
    """The first sentence of ``mistakes`` whose tensors are all near those of ``got``."""
    return next((sentence for sentence, wrong in mistakes if _same(got, wrong, tolerances)), None)


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
        largest_difference(got[name], value) <= EXPLAINED * tolerances[name].limit
        for name, value in wrong.items()
    )


def _not_deterministic(distance: float) -> str:
    return (
        f"not deterministic: the same call gives other values the second time, by {distance:.1e}; dropout that is on, "
        "values left from the call before, memory that nothing has written, or a race"
    )
