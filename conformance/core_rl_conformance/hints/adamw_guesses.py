"""Known mistakes around AdamW: steps that are made with one of them, to compare with a wrong engine's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from core_rl_conformance.hints.adamw_rules import RIGHT, Rule, rule_step
from core_rl_conformance.hints.diagnose import Finding, compare_named
from core_rl_oracle.oracle import AdamW, AdamWState
from core_rl_oracle.plain_adamw import StepTolerances
from core_rl_oracle.tolerance import Tolerance, largest_difference

__all__ = ["Found", "Steps", "compare_state", "compare_weights"]

RULES: tuple[tuple[str, Rule], ...] = (
    ("the decay goes through the moments (Adam, not AdamW)", Rule(coupled=True)),
    ("norms and biases decay as well", Rule(vectors=True)),
    ("the decay has the configured learning rate, not the scheduled one", Rule(base_decay=True)),
    ("the bias correction is one step late", Rule(late=1)),
    *((f"the bias correction stays at step {most}", Rule(most=most)) for most in range(1, 8)),
    *((f"the step count wraps around at {modulus}", Rule(modulus=modulus)) for modulus in (2**8, 2**16)),
    ("the bias of the second moment is not corrected", Rule(uncorrected=frozenset({"exp_avg_sq"}))),
    ("the bias of the first moment is not corrected", Rule(uncorrected=frozenset({"exp_avg"}))),
    ("no bias is corrected", Rule(uncorrected=frozenset({"exp_avg", "exp_avg_sq"}))),
    ("eps is inside the square root", Rule(eps="inside")),
    ("eps is added before the bias correction", Rule(eps="before")),
    ("Nesterov momentum", Rule(nesterov=True)),
    ("AMSGrad", Rule(amsgrad=True)),
    ("the second moment gets gradients before clipping", Rule(unclipped=frozenset({"exp_avg_sq"}))),
    ("the first moment gets gradients before clipping", Rule(unclipped=frozenset({"exp_avg"}))),
)
UNDECAYED = {
    "embeddings do not decay": re.compile(r"embed|\.wte\.|\.wpe\."),
    "the head does not decay": re.compile(r"^(lm_head|score)\."),
    "embeddings and the head do not decay": re.compile(r"embed|\.wte\.|\.wpe\.|^(lm_head|score)\."),
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """What an engine has after some steps: weights and both moments, by name."""

    params: Mapping[str, Tensor]
    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Some steps: where they began, the gradients and the learning rate of each, and how they are made."""

    config: AdamW
    start: AdamWState
    grads: Sequence[Mapping[str, Tensor]]
    rates: Sequence[float]
    rule: Rule = RIGHT

    def state(self) -> AdamWState:
        """Weights and moments after them."""
        state, largest = self.start.copy(), dict[str, Tensor]()
        for grads, rate in zip(self.grads, self.rates, strict=True):
            rule_step(self.rule, self.config, state, grads, rate, largest)
        return state

    def weights(self) -> dict[str, Tensor]:
        """The weights after them."""
        return self.state().params


def compare_weights(
    what: str, got: Mapping[str, Tensor], steps: Steps, tolerances: Mapping[str, Tolerance], ranks: int
) -> Finding:
    """Compare the weights ``got`` after ``steps`` on ``ranks`` data-parallel ranks; name a known mistake."""
    expected = steps.weights()
    finding = compare_named(what, got, expected, tolerances, since=steps.start.params)
    if finding.problem is None:
        return finding
    guess = None
    if set(got) == set(steps.start.params):
        guess = _guess(steps, lambda wrong: _near(got, wrong.params, expected, tolerances), ranks)
    return replace(finding, problem="\n".join(filter(None, (finding.problem, guess))))


def compare_state(what: str, got: Found, steps: Steps, allowed: StepTolerances, ranks: int) -> list[Finding]:
    """Compare weights and moments after ``steps`` on ``ranks`` data-parallel ranks.

    If some are wrong, one finding tells of all three, and names the known mistake that explains them.
    """
    expected = steps.state()
    findings = {
        "weights": compare_named(
            f"weights {what}", got.params, expected.params, allowed.master, since=steps.start.params
        ),
        "first moments": compare_named(
            f"first moments {what}", got.exp_avg, expected.exp_avg, allowed.exp_avg
        ),
        "second moments": compare_named(
            f"second moments {what}", got.exp_avg_sq, expected.exp_avg_sq, allowed.exp_avg_sq
        ),
    }
    wrong = [finding for finding in findings.values() if finding.problem is not None]
    if not wrong:
        return list(findings.values())
    verdict = ", ".join(
        f"{kind} {'right' if finding.problem is None else 'wrong'}" for kind, finding in findings.items()
    )
    names = set(steps.start.params)
    guess = None
    if all(set(part) == names for part in (got.params, got.exp_avg, got.exp_avg_sq)):
        guess = _rounded(got) or _guess(steps, lambda wrong: _all_near(got, wrong, expected, allowed), ranks)
    lines = [f"{what}: {verdict}", *(finding.problem for finding in wrong), guess]
    return [replace(wrong[0], problem="\n".join(line for line in lines if line))]


def _near(
    got: Mapping[str, Tensor],
    wrong: Mapping[str, Tensor],
    right: Mapping[str, Tensor],
    tolerances: Mapping[str, Tolerance],
) -> bool:
    """Whether ``wrong`` explains ``got``: tolerances are for what is ``right``, and grow with the values."""
    scale = max(1.0, _largest(wrong) / max(_largest(right), 1e-300))
    return all(
        largest_difference(got[name], value) <= scale * tolerances[name].limit
        for name, value in wrong.items()
    )


def _largest(tensors: Mapping[str, Tensor]) -> float:
    return max(float(value.abs().max()) for value in tensors.values())


def _all_near(got: Found, wrong: AdamWState, right: AdamWState, allowed: StepTolerances) -> bool:
    return (
        _near(got.params, wrong.params, right.params, allowed.master)
        and _near(got.exp_avg, wrong.exp_avg, right.exp_avg, allowed.exp_avg)
        and _near(got.exp_avg_sq, wrong.exp_avg_sq, right.exp_avg_sq, allowed.exp_avg_sq)
    )


def _rounded(got: Found) -> str | None:
    """Float32 moments are bfloat16 numbers only if somebody has rounded them."""
    kinds = {"first": got.exp_avg, "second": got.exp_avg_sq}
    rounded = [
        kind
        for kind, moments in kinds.items()
        if any(bool(value.any()) for value in moments.values())
        and all(bool((value == value.bfloat16()).all()) for value in moments.values())
    ]
    return f"it looks like: the {' and '.join(rounded)} moments are kept in bfloat16" if rounded else None


def _guess(steps: Steps, fits: Callable[[AdamWState], bool], ranks: int) -> str | None:
    for sentence, wrong in _mistakes(steps, ranks):
        if fits(wrong.state()):
            return f"it looks like: {sentence}"
    return None


def _mistakes(steps: Steps, ranks: int) -> Iterator[tuple[str, Steps]]:
    config, rates = steps.config, list(steps.rates)
    for sentence, changed in (
        ("gradients are not clipped", replace(config, max_grad_norm=None)),
        ("the weights do not decay", replace(config, weight_decay=0.0)),
        ("betas are (0.9, 0.999), torch's default", replace(config, betas=(0.9, 0.999))),
        ("betas are exchanged", replace(config, betas=config.betas[::-1])),
        *((f"eps is {eps:g}", replace(config, eps=eps)) for eps in (1e-8, 1e-6, 1e-5, 1e-12)),
    ):
        if changed != config:
            yield sentence, replace(steps, config=changed)
    if len(set(rates)) > 1:
        yield (
            "each step has the learning rate of the step before",
            replace(steps, rates=[*rates[:1], *rates[:-1]]),
        )
        yield "the learning rate stays what it was at first", replace(steps, rates=rates[:1] * len(rates))
    if steps.start.count:
        start = replace(steps.start.copy(), count=0)
        yield "the step count of the bias correction began again", replace(steps, start=start)
    for factor in dict.fromkeys((2.0, 0.5, float(ranks), 1.0 / ranks)):
        if factor != 1.0:
            sentence = f"the optimizer gets the exported gradients times {factor:g}"
            yield sentence, replace(steps, rule=Rule(scale=factor))
    for sentence, rule in RULES:
        yield sentence, replace(steps, rule=rule)
    for sentence, pattern in UNDECAYED.items():
        names = frozenset(name for name in steps.start.params if pattern.search(name))
        yield sentence, replace(steps, rule=Rule(undecayed=names))
