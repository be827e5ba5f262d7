"""What went wrong in AdamW steps is recognized by redoing them with the mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core_rl_conformance.hints.adamw_guesses import Found, Steps, compare_state, compare_weights
from core_rl_conformance.hints.adamw_rules import Rule
from core_rl_oracle.oracle import AdamW, AdamWState
from core_rl_oracle.plain_adamw import StepTolerances
from core_rl_oracle.tolerance import Tolerance

CONFIG = AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=1.0)
GENERATOR = torch.Generator().manual_seed(0)


def _tensors() -> dict[str, Tensor]:
    shapes = {"embed_tokens.weight": (3, 4), "matrix": (3, 4), "norm": (4,), "lm_head.weight": (3, 4)}
    return {
        name: torch.randn(shape, generator=GENERATOR, dtype=torch.float64) for name, shape in shapes.items()
    }


START = AdamWState.start(_tensors())
START.count = 3
STEPS = Steps(config=CONFIG, start=START, grads=[_tensors() for _ in range(3)], rates=[1e-2, 8e-3, 6e-3])
ALLOWED = dict.fromkeys(START.params, Tolerance(baseline=0.0, floor=1e-9))
ALL_ALLOWED = StepTolerances(master=ALLOWED, exp_avg=ALLOWED, exp_avg_sq=ALLOWED)
MISTAKES = {
    "gradients are not clipped": replace(STEPS, config=replace(CONFIG, max_grad_norm=None)),
    "the weights do not decay": replace(STEPS, config=replace(CONFIG, weight_decay=0.0)),
    "torch's default": replace(STEPS, config=replace(CONFIG, betas=(0.9, 0.999))),
    "eps is 1e-08": replace(STEPS, config=replace(CONFIG, eps=1e-8)),
    "through the moments": replace(STEPS, rule=Rule(coupled=True)),
    "norms and biases decay": replace(STEPS, rule=Rule(vectors=True)),
    "configured learning rate": replace(STEPS, rule=Rule(base_decay=True)),
    "embeddings do not decay": replace(STEPS, rule=Rule(undecayed=frozenset({"embed_tokens.weight"}))),
    "the head does not decay": replace(STEPS, rule=Rule(undecayed=frozenset({"lm_head.weight"}))),
    "of the step before": replace(STEPS, rates=[1e-2, 1e-2, 8e-3]),
    "stays what it was": replace(STEPS, rates=[1e-2] * 3),
    "count of the bias correction": replace(STEPS, start=replace(START.copy(), count=0)),
    "one step late": replace(STEPS, rule=Rule(late=1)),
    "stays at step 5": replace(STEPS, rule=Rule(most=5)),
    "of the second moment is not corrected": replace(STEPS, rule=Rule(uncorrected=frozenset({"exp_avg_sq"}))),
    "of the first moment is not corrected": replace(STEPS, rule=Rule(uncorrected=frozenset({"exp_avg"}))),
    "inside the square root": replace(STEPS, rule=Rule(eps="inside")),
    "before the bias correction": replace(STEPS, rule=Rule(eps="before")),
    "Nesterov": replace(STEPS, rule=Rule(nesterov=True)),
    "AMSGrad": replace(STEPS, rule=Rule(amsgrad=True)),
    "the second moment gets gradients before clipping": replace(
        STEPS, rule=Rule(unclipped=frozenset({"exp_avg_sq"}))
    ),
    "times 0.25": replace(STEPS, rule=Rule(scale=0.25), config=replace(CONFIG, max_grad_norm=None)),
}


def _steps(sentence: str) -> Steps:
    # Clipping would hide a factor.
    return replace(STEPS, config=replace(CONFIG, max_grad_norm=None)) if "times" in sentence else STEPS


def _found(state: AdamWState) -> Found:
    return Found(params=state.params, exp_avg=state.exp_avg, exp_avg_sq=state.exp_avg_sq)


@pytest.mark.parametrize("sentence", MISTAKES)
def test_known_mistakes_are_named_from_the_weights(sentence: str) -> None:
    wrong = MISTAKES[sentence].weights()
    problem = compare_weights("weights", wrong, _steps(sentence), ALLOWED, ranks=4).problem
    assert problem is not None and sentence in problem.splitlines()[-1]


@pytest.mark.parametrize("sentence", MISTAKES)
def test_known_mistakes_are_named_from_weights_and_moments(sentence: str) -> None:
    wrong = _found(MISTAKES[sentence].state())
    (finding,) = compare_state("after 3 steps", wrong, _steps(sentence), ALL_ALLOWED, ranks=4)
    assert finding.problem is not None and sentence in finding.problem.splitlines()[-1]


def test_weights_and_moments_are_judged_together() -> None:
    state = STEPS.state()
    state.exp_avg_sq["norm"] *= 2
    (finding,) = compare_state("after 3 steps", _found(state), STEPS, ALL_ALLOWED, ranks=1)
    assert finding.problem is not None and "looks like: the" not in finding.problem
    assert finding.problem.startswith(
        "after 3 steps: weights right, first moments right, second moments wrong"
    )


def test_rounded_moments_are_recognized() -> None:
    state = STEPS.state()
    state.exp_avg_sq = {name: value.bfloat16().double() for name, value in state.exp_avg_sq.items()}
    (finding,) = compare_state("after 3 steps", _found(state), STEPS, ALL_ALLOWED, ranks=1)
    assert finding.problem is not None and "second moments are kept in bfloat16" in finding.problem


def test_steps_by_the_right_rule_are_the_oracles() -> None:
    state = START.copy()
    for grads, rate in zip(STEPS.grads, STEPS.rates, strict=True):
        CONFIG.step(state, grads, rate)
    findings = compare_state("after 3 steps", _found(state), STEPS, ALL_ALLOWED, ranks=1)
    assert [finding.problem for finding in findings] == [None] * 3
    assert max(finding.error for finding in findings) <= 1e-15


def test_right_steps_have_no_problem_and_unknown_mistakes_no_name() -> None:
    assert compare_weights("weights", STEPS.weights(), STEPS, ALLOWED, ranks=1).problem is None
    wrong = {name: value + torch.randn(value.shape) for name, value in STEPS.weights().items()}
    problem = compare_weights("weights", wrong, STEPS, ALLOWED, ranks=1).problem
    assert problem is not None and "looks like" not in problem
