"""Rewards for mathematical answers, through math-verify, without which this module cannot be imported."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from core_rl.errors import ConfigError
from core_rl_trainer.rewards.text import expected_answer

try:
    from math_verify import parse, verify
except ImportError as _missing:
    raise ConfigError(
        'it needs math-verify, which is not installed; pip install "core-rl-trainer[math]"'
    ) from _missing

__all__ = ["math_verify"]

# It warns of the time limits that are off below.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_verify(completion: str, sample: Mapping[str, Any]) -> float:
    r"""1 if the last mathematical expression of the completion equals the sample's ``answer``; else 0.

    Both may be LaTeX or plain: ``\boxed{\frac{1}{2}}`` equals ``0.5``. Some expressions take long to compare:
    ``rollout.reward_processes`` limits their time.
    """
    # Its own time limits use signals, which only a main thread has.
    answer = parse(_as_latex(str(expected_answer(sample))), parsing_timeout=None)
    parsed = parse(completion, parsing_timeout=None)
    return float(verify(answer, parsed, timeout_seconds=None))


def _as_latex(answer: str) -> str:
    """``answer`` as a formula: data sets hold it with and without its dollars."""
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
