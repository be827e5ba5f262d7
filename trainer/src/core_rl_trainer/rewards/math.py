"""Rewards for mathematical answers, through math-verify, without which this module cannot be imported."""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from core_rl.errors import ConfigError
from core_rl_trainer.data.examples import answer_text
from core_rl_trainer.rewards.numbers import NUMBER
from core_rl_trainer.rewards.text import alternatives, answer_problem, checks_answers, expected_answer

try:
    from math_verify import parse, verify
except ImportError as _missing:
    raise ConfigError(
        'it needs math-verify, which is not installed; pip install "core-rl-trainer[math]"'
    ) from _missing

# It warns of the time limits that are off below.
logging.getLogger("math_verify").setLevel(logging.ERROR)


PARSING_LIMIT_S = 5
"""Time limit for an answer before the run starts, in seconds."""
FORMULA = re.compile(r"\$[^$\n]*\w[^$\n]*\$|.*\\boxed\{.*\w.*", re.DOTALL | re.ASCII)
"""An answer in which math-verify always reads an expression."""
PRICES = re.compile(r"\$\d[^$]*\s\$\d")
"""Two prices, whose dollars enclose no formula."""
EXPONENT = re.compile(r"\s*[-+]?\d+(\.\d+)?[eE][-+]?\d{1,3}\s*", re.ASCII)
WORD = re.compile(r"(?<!\S)(?!(?:and|or|sin|cos|tan|log|sqrt)\b)[A-Za-z]{3,}")
PLAIN_NUMBER = re.compile(r"(?:^|[\s=])[$€£¥₹]?-?\d")


def _parsed(answer: Any) -> list[Any]:
    """The expressions of an answer; nothing where math-verify reads none."""
    if not isinstance(answer, str | int | float | Decimal) or isinstance(answer, bool):
        return []
    # The time limit uses signals, which only a main thread has; rollout.reward_timeout_s holds for other threads.
    limit = PARSING_LIMIT_S if threading.current_thread() is threading.main_thread() else None
    return [value for text in _forms(answer_text(answer)) for value in parse(text, parsing_timeout=limit)]


def _is_readable(answer: Any) -> bool | None:
    """True where `_parsed` reads ``answer``, else None. Numbers and formulas need not be parsed, which takes long."""
    if isinstance(answer, float | Decimal):
        return math.isfinite(answer) or None
    if isinstance(answer, str) and any(FORMULA.fullmatch(text) for text in _forms(answer)):
        return True
    return None if PRICES.search(str(answer)) else bool(_parsed(answer)) or None


@checks_answers(lambda answer: answer_problem(answer, _is_readable, "a formula or a number"))
def math_verify(completion: str, sample: Mapping[str, Any]) -> float:
    r"""1 if the last mathematical expression of the completion equals the sample's ``answer``, or one of several.

    Else 0. Both may be LaTeX or plain: ``\boxed{\frac{1}{2}}`` equals ``0.5``. Some expressions take long to compare:
    ``rollout.reward_processes`` limits their time.
    """
    answers = alternatives(expected_answer(sample, math_verify))
    if completion.strip() in map(answer_text, answers):  # a letter, in which no formula is read
        return 1.0
    parsed = parse(completion, parsing_timeout=None)
    return float(any(verify(_parsed(answer), parsed, timeout_seconds=None) for answer in answers))


def _forms(answer: str) -> list[str]:
    """``answer`` as math-verify reads it.

    A formula gets its dollars: data sets have it with and without them, and after ``####``. Words are factors in a
    formula, so that the number of ``5 dollars`` is read from the text as well.
    """
    answer = answer.rpartition("####")[2]
    if "\\boxed" in answer or re.search(r"(?<!\\)\$", answer):
        return [answer]
    if "$" in answer:  # a price, such as \\$5
        return [f"\\boxed{{{answer}}}"]
    if EXPONENT.fullmatch(answer):
        return [f"${answer}$", f"${Decimal(answer.strip()):f}$"]
    return [f"${answer}$", answer] if _has_one_number(answer) else [f"${answer}$"]


def _has_one_number(answer: str) -> bool:
    """Whether ``answer`` is a text with words and a single number, or a number after "answer"."""
    plain = WORD.search(answer) and PLAIN_NUMBER.search(answer) and not re.search(r"[\\{}^_]", answer)
    return bool(plain) and ("answer" in answer.lower() or len(NUMBER.findall(answer)) == 1)
