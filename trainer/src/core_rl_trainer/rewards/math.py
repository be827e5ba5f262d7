"""Rewards for mathematical answers, through math-verify, without which this module cannot be imported."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from core_rl.errors import ConfigError
from core_rl_trainer.data.examples import answer_text
from core_rl_trainer.rewards.text import alternatives, answer_problem, checks_answers, expected_answer

try:
    from math_verify import parse, verify
except ImportError as _missing:
    raise ConfigError(
        'it needs math-verify, which is not installed; pip install "core-rl-trainer[math]"'
    ) from _missing

__all__ = ["math_verify"]

# It warns of the time limits that are off below.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def _parsed(answer: Any) -> list[Any] | None:
    """The expressions of an answer; None where math-verify reads nothing."""
    if not isinstance(answer, str | int | float | Decimal) or isinstance(answer, bool):
        return None
    # Its own time limits use signals, which only a main thread has.
    return parse(_as_latex(answer_text(answer)), parsing_timeout=None) or None


def _is_readable(answer: Any) -> bool | None:
    """True where `_parsed` reads ``answer``, else None. Numbers and formulas need not be parsed, which takes long."""
    if isinstance(answer, float | Decimal):
        return math.isfinite(answer) or None
    formula = isinstance(answer, str) and _as_latex(answer) != answer and any(map(str.isalnum, answer))
    return formula or bool(_parsed(answer)) or None


@checks_answers(lambda answer: answer_problem(answer, _is_readable, "a formula or a number"))
def math_verify(completion: str, sample: Mapping[str, Any]) -> float:
    r"""1 if the last mathematical expression of the completion equals the sample's ``answer``, or one of several.

    Else 0. Both may be LaTeX or plain: ``\boxed{\frac{1}{2}}`` equals ``0.5``. Some expressions take long to compare:
    ``rollout.reward_processes`` limits their time.
    """
    answers = alternatives(expected_answer(sample, math_verify))
    parsed = parse(completion, parsing_timeout=None)
    return float(any(verify(_parsed(answer) or [], parsed, timeout_seconds=None) for answer in answers))


def _as_latex(answer: str) -> str:
    """``answer`` as a formula: data sets have it with and without its dollars, and after ``####``."""
    answer = answer.rpartition("####")[2]
    if "\\boxed" in answer or re.search(r"(?<!\\)\$", answer):
        return answer
    return f"\\boxed{{{answer}}}" if "$" in answer else f"${answer}$"  # a price, such as \\$5
