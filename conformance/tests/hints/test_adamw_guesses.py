"""Mistakes in AdamW steps are recognized by redoing the steps with the mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core_rl_conformance.hints.mistakes import DENOMINATORS, RULES, Steps, compare_steps
from core_rl_oracle.oracle import AdamW, OptimizerState
from core_rl_oracle.tolerance import Tolerance

CONFIG = AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=1.0)
GENERATOR = torch.Generator().manual_seed(0)


def _tensors() -> dict[str, Tensor]:
    shapes = {"embed_tokens.weight": (3, 4), "matrix": (3, 4), "norm": (4,), "lm_head.weight": (3, 4)}
    return {
        name: torch.randn(shape, generator=GENERATOR, dtype=torch.float64) for name, shape in shapes.items()
    }


START = OptimizerState.start(_tensors())
START.count = 3
STEPS = Steps(config=CONFIG, start=START, grads=[_tensors() for _ in range(3)], rates=[1e-2, 8e-3, 6e-3])
ALLOWED = dict.fromkeys(START.params, Tolerance(baseline=0.0, floor=1e-9))
ALL_ALLOWED = dict.fromkeys(("params", "exp_avg", "exp_avg_sq"), ALLOWED)
UNCLIPPED = replace(CONFIG, max_grad_norm=None)
QUARTERS = [{name: 0.25 * grad for name, grad in grads.items()} for grads in STEPS.grads]
MISTAKES = {
    "gradients are not clipped": replace(STEPS, config=UNCLIPPED),
    "the weights do not decay": replace(STEPS, config=replace(CONFIG, weight_decay=0.0)),
    "eps is 1e-08": replace(STEPS, config=replace(CONFIG, eps=1e-8)),
    "of the step before": replace(STEPS, rates=[1e-2, 1e-2, 8e-3]),
    "times 0.25": replace(STEPS, config=UNCLIPPED, grads=QUARTERS),
    "through the moments": replace(STEPS, rule=RULES["the decay goes through the moments (Adam, not AdamW)"]),
    "norms and biases decay": replace(STEPS, rule=RULES["norms and biases decay as well"]),
    "stays at step 5": replace(STEPS, rule=RULES["the bias correction stays at step 5"]),
    **{sentence: replace(STEPS, rule=RULES[sentence]) for sentence in DENOMINATORS},
    "wraps around at 256": replace(
        STEPS, start=replace(START.copy(), count=254), rule=RULES["the step count wraps around at 256"]
    ),
}


def _kinds(state: OptimizerState) -> dict[str, dict[str, Tensor]]:
    return {"params": state.params, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}


def _steps(sentence: str) -> Steps[AdamW]:
    # Clipping would hide a factor, and few steps a count that wraps around.
    start = MISTAKES[sentence].start
    return replace(STEPS, start=start, config=UNCLIPPED if "times" in sentence else CONFIG)


@pytest.mark.parametrize("sentence", MISTAKES)
def test_known_mistakes_are_named(sentence: str) -> None:
    wrong = _kinds(MISTAKES[sentence].state())
    for got in ({"params": wrong["params"]}, wrong):
        (finding,) = compare_steps("after 3 steps", got, _steps(sentence), ALL_ALLOWED, ranks=4)
        assert finding.problem is not None and sentence in finding.problem.splitlines()[-1]


def test_weights_and_moments_are_judged_together() -> None:
    state = STEPS.state()
    state.exp_avg_sq["norm"] *= 2
    (finding,) = compare_steps("after 3 steps", _kinds(state), STEPS, ALL_ALLOWED, ranks=1)
    assert finding.problem is not None and "looks like: the" not in finding.problem
    assert finding.problem.startswith(
        "after 3 steps: weights right, first moments right, second moments wrong"
    )


def test_rounded_moments_are_recognized() -> None:
    state = STEPS.state()
    state.exp_avg_sq = {name: value.bfloat16().double() for name, value in state.exp_avg_sq.items()}
    (finding,) = compare_steps("after 3 steps", _kinds(state), STEPS, ALL_ALLOWED, ranks=1)
    assert finding.problem is not None and "each number is one of bfloat16" in finding.problem


def test_steps_by_the_right_rule_are_the_oracles() -> None:
    state = START.copy()
    for grads, rate in zip(STEPS.grads, STEPS.rates, strict=True):
        CONFIG.step(state, grads, rate)
    findings = compare_steps("after 3 steps", _kinds(state), STEPS, ALL_ALLOWED, ranks=1)
    assert [finding.problem for finding in findings] == [None] * 3
    assert max(finding.error for finding in findings) <= 1e-15


def test_unknown_adamw_mistakes_get_no_name() -> None:
    (right,) = compare_steps("after", {"params": STEPS.state().params}, STEPS, ALL_ALLOWED, ranks=1)
    assert right.problem is None
    wrong = {name: value + torch.randn(value.shape) for name, value in STEPS.state().params.items()}
    (finding,) = compare_steps("after", {"params": wrong}, STEPS, ALL_ALLOWED, ranks=1)
    problem = finding.problem
    assert problem is not None and "looks like" not in problem
