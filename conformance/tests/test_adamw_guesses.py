"""What went wrong in AdamW steps is recognized by redoing them with the mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core_rl_conformance.hints.adamw_guesses import Steps, compare_weights
from core_rl_conformance.truth.oracle import AdamW, AdamWState
from core_rl_conformance.truth.tolerance import Tolerance

CONFIG = AdamW(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=1.0)
GENERATOR = torch.Generator().manual_seed(0)


def _tensors() -> dict[str, Tensor]:
    shapes = {"matrix": (3, 4), "norm": (4,)}
    return {
        name: torch.randn(shape, generator=GENERATOR, dtype=torch.float64) for name, shape in shapes.items()
    }


START = AdamWState.start(_tensors())
START.count = 3
STEPS = Steps(config=CONFIG, start=START, grads=[_tensors() for _ in range(3)], rates=[1e-2, 8e-3, 6e-3])
ALLOWED = dict.fromkeys(START.params, Tolerance(baseline=0.0, floor=1e-9))
MISTAKES = {
    "gradients are not clipped": replace(STEPS, config=replace(CONFIG, max_grad_norm=None)),
    "the weights do not decay": replace(STEPS, config=replace(CONFIG, weight_decay=0.0)),
    "torch's default": replace(STEPS, config=replace(CONFIG, betas=(0.9, 0.999))),
    "eps is 1e-08": replace(STEPS, config=replace(CONFIG, eps=1e-8)),
    "through the moments": replace(STEPS, coupled=True),
    "norms and biases decay": replace(STEPS, vectors=True),
    "of the step before": replace(STEPS, rates=[1e-2, 1e-2, 8e-3]),
    "stays what it was": replace(STEPS, rates=[1e-2] * 3),
    "count of the bias correction": replace(STEPS, start=replace(START.copy(), count=0)),
    "times 0.25": replace(STEPS, scale=0.25, config=replace(CONFIG, max_grad_norm=None)),
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_known_mistakes_are_named(sentence: str) -> None:
    # Clipping would hide a factor.
    config = replace(CONFIG, max_grad_norm=None) if "times" in sentence else CONFIG
    steps = replace(STEPS, config=config)
    problem = compare_weights("weights", MISTAKES[sentence].weights(), steps, ALLOWED, ranks=4).problem
    assert problem is not None and sentence in problem.splitlines()[-1]


def test_right_steps_have_no_problem_and_unknown_mistakes_no_name() -> None:
    assert compare_weights("weights", STEPS.weights(), STEPS, ALLOWED, ranks=1).problem is None
    wrong = {name: value + torch.randn(value.shape) for name, value in STEPS.weights().items()}
    problem = compare_weights("weights", wrong, STEPS, ALLOWED, ranks=1).problem
    assert problem is not None and "looks like" not in problem
