"""Warnings about a run that learns nothing, and the end of it where the recipe asks for it."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest

from core_rl.config.base import parse_config
from core_rl.errors import ConfigError
from core_rl_trainer.recipe.sections import StopSection
from core_rl_trainer.run.watch import Verdict, Watch

SUPERVISED = {"loss": 0.5, "grad_norm": 1.0, "update_successful": 1.0}
GOOD = SUPERVISED | {"reward": 0.5, "reward_min": 0.0, "reward_max": 1.0, "advantage_max": 1.5}
GOOD["groups_without_signal"] = 0.2
EQUAL = {"reward": 1.0, "reward_min": 1.0, "groups_without_signal": 1.0, "advantage_max": 0.0}


def see(changes: list[dict[str, float]], base: dict[str, float], **stop_on: Any) -> list[Verdict | None]:
    watch = Watch(parse_config(StopSection, stop_on), {2: "</s>"})
    return [watch.see(step, base | change) for step, change in enumerate(changes, start=1)]


@pytest.mark.parametrize(
    ("base", "changes", "warnings"),
    [
        (GOOD, [{}] * 9, []),
        (SUPERVISED, [{}] * 9, []),
        (
            SUPERVISED,
            [{}, {"loss": math.nan, "update_successful": 0.0}, {}],
            ["step 2: loss is nan; .*optimizer.lr"],
        ),
        (GOOD, [EQUAL, EQUAL, {}, EQUAL, EQUAL], []),
        (
            GOOD,
            [EQUAL] * 9,
            [r"step 3: the completions of each prompt all have the same reward \(1 on average\)"],
        ),
        (GOOD, [{"advantage_max": 1e-12}] * 4, ["step 3: all advantages are 0"]),
        (SUPERVISED, [{"update_successful": 0.0}] * 4, ["step 3: every update was skipped: no token"]),
        (
            GOOD,
            [{}] + [{"reward": 0.001}] * 4,
            ["step 4: the reward has fallen to 0.001, .* after a mean of 0.5"],
        ),
        (GOOD, [{"reward": 0.01}] + [{"reward": 0.0}] * 4, []),
        (GOOD, [{"truncated": 1.0}, {"truncated": 1.0}, {"truncated": 0.9}] * 3, []),
        (
            GOOD,
            [{"truncated": 1.0, "completion_tokens": 12.0}] * 5,
            [
                r"step 3: all completions are truncated, after 12 tokens .* \(</s> \(2\)\)\. rollout.max_new_tokens is"
            ],
        ),
    ],
)
def test_warnings_name_the_cause_once(
    caplog: pytest.LogCaptureFixture,
    base: dict[str, float],
    changes: list[dict[str, float]],
    warnings: list[str],
) -> None:
    with caplog.at_level(logging.WARNING):
        assert see(changes, base) == [None] * len(changes)
    assert len(caplog.messages) == len(warnings)
    for text, pattern in zip(caplog.messages, warnings, strict=True):
        assert re.search(pattern, text)


@pytest.mark.parametrize(
    ("stop_on", "change", "step", "good"),
    [
        ({"nan": True}, {"grad_norm": math.inf}, 1, False),
        ({"no_signal": True}, EQUAL, 3, True),
        ({"no_signal": 5}, EQUAL, 5, True),
        ({"skipped": 2}, {"update_successful": 0.0}, 2, True),
    ],
)
def test_rule_ends_run_after_steps(
    stop_on: dict[str, Any], change: dict[str, float], step: int, good: bool
) -> None:
    *before, last = see([change] * step, GOOD, **stop_on)
    assert before == [None] * (step - 1)
    assert last is not None and last.weights_are_good == good
    assert last.reason.startswith(f"step {step}, stop_on.{next(iter(stop_on))}: ")


@pytest.mark.parametrize("value", [0, -1, "x", None, 1.5])
def test_rule_is_switch_or_step_count(value: object) -> None:
    with pytest.raises(ConfigError, match="no_signal"):
        parse_config(StopSection, {"no_signal": value})
