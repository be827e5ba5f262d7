"""Reward at which a run of `quickstart_race.py` ends."""

from __future__ import annotations

import os

from core_rl_trainer.callbacks import EvaluationEnd, Event, StopRun

VARIABLE = "CORE_RL_RACE_TARGET"


def reached(reward: float) -> bool:
    """Whether ``reward`` is at the target."""
    return reward >= float(os.environ[VARIABLE])


def stop_at_target(event: Event) -> None:
    """Stop the run once the sampled reward on the evaluation prompts is there: a callback of core-rl's side."""
    if isinstance(event, EvaluationEnd) and reached(event.metrics["eval_reward"]):
        raise StopRun("the reward is at the target")
