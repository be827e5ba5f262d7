"""Training runs that are compared with the oracle at the end only."""

from __future__ import annotations

from core_rl_conformance.catalogue import check
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.hints.diagnose import compare_named
from core_rl_conformance.procedures.end_to_end import (
    expected_training,
    train_end_to_end,
    training_of,
    verify_rates,
)


@check("I1.training", each="layout")
def training_follows_the_oracle(subject: EngineUnderTest) -> None:
    """Several steps of ``train_batch`` go the oracle's way: the loss and norm of each, and the last weights.

    Nothing is exported before the end, as in a real run.

    Why: some bugs show from the second step on: a schedule that is advanced twice (slime #1152), a clip scale or
    gradients of the step before; and stale weights that an export in between would refresh.
    Look at: the first step that is off. If all losses and norms are right, look at the optimizer:
    I20.adamw and I4.clipping show it alone, with exports between the steps.
    """
    training = training_of(subject)
    expected = expected_training(subject, training)
    trained = train_end_to_end(subject, training)
    truth = expected.truth
    for step, report in enumerate(trained.reports):
        for name, found, value, allowed in (
            ("loss", report["loss"], truth.losses[step], expected.losses[step]),
            ("norm", report["grad_norm"], truth.norms[step], expected.norms[step]),
        ):
            subject.verify_scalar(f"the {name} of step {step}", found, value, allowed)
    verify_rates(subject, training, trained)
    start = subject.expected.oracle(subject.model()).parameters()
    what = f"weights after {len(trained.reports)} steps without an export"
    subject.verify(compare_named(what, trained.weights, truth.weights, expected.weights, since=start))
