"""A callback of ``core-rl train`` for `quickstart_race.py`."""

from __future__ import annotations

import os

from core_rl_trainer.callbacks import EvaluationEnd, Event, StopRun

TARGET = "CORE_RL_RACE_TARGET"
"""Environment variable with the reward to reach."""


def stop_at_target(event: Event) -> None:
    """Stop the run once the sampled reward on the evaluation prompts is at the target."""
    if isinstance(event, EvaluationEnd) and event.metrics["eval_reward"] >= float(os.environ[TARGET]):
        raise StopRun("the reward is at the target")
