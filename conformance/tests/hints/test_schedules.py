"""Known mistakes around schedules are named from the rates of all steps."""

from __future__ import annotations

import pytest

from core_rl_conformance.hints.mistakes import RATES, explain_rates
from core_rl_oracle.oracle import Schedule

SCHEDULE = Schedule(type="cosine", warmup_steps=3, total_steps=8, min_lr_ratio=0.1)
STEPS = range(10)


@pytest.mark.parametrize("sentence", RATES)
def test_mistakes_of_schedules_are_named(sentence: str) -> None:
    rates = [0.5 * RATES[sentence](SCHEDULE, step) for step in STEPS]
    assert explain_rates(rates, STEPS, SCHEDULE, 0.5, 1e-12) == sentence


def test_other_rates_have_no_known_cause() -> None:
    rates = [0.4 * SCHEDULE.factor(step) for step in STEPS]
    assert explain_rates(rates, STEPS, SCHEDULE, 0.5, 1e-12) is None
