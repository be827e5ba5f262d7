"""Numbers in texts, values of rewards, answers, and samples as JSON."""

from __future__ import annotations

import datetime as dt
import json
import unicodedata
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_rl.errors import RolloutError
from core_rl_trainer.data.plain import WrittenFloat, json_text
from core_rl_trainer.rewards.functions import as_reward
from core_rl_trainer.rewards.text import integer_match, text_match

FORMS = (
    "{}",
    "so {}.",
    "${}",
    "$ {}",
    "\\boxed{{{}}}",
    "**{}**",
    "= {}",
    "({})",
    "{}%",
    "x={}",
    "1, {}",
    "{}.0",
    "00{}",
)


@given(
    number=st.integers(0, 10**12),
    mark=st.sampled_from(["", ",", "_", " ", "\u00a0", "\\,"]),
    form=st.sampled_from(FORMS),
)
@pytest.mark.parametrize("sign", ["", "-", "\u2212"])
def test_written_numbers_match_their_value_only(sign: str, number: int, mark: str, form: str) -> None:
    digits = f"{number:,}".replace(",", mark) if form != "00{}" else str(number)
    completion = form.format(sign + digits) if form != "00{}" else f"{sign}00{number}"
    value = -number if sign else number
    assert integer_match(completion, {"answer": value}) == 1
    assert integer_match(completion, {"answer": str(value + 1)}) == 0


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so 3.5", 5, 0),
        ("so 3.5", 3.5, 1),
        ("10-7", -7, 0),
        ("3-5", 5, 1),
        ("5,6", 6, 1),
        ("1/2", 2, 0),
        ("1 \\frac{1}{2}", "1.5", 1),
        ("1e3", "1,000", 1),
        ("\uff14\uff12", 42, 1),
        ("9" * 5000, 9, 0),
        ("none", 0, 0),
        ("7", ["8", "7"], 1),
        ("7", {"target": ["8", "7"]}, 1),
        ("7", '["8", "7"]', 1),
        ("7", {"target": np.array([8, 7])}, 1),
        ("7", np.int64(7), 1),
        ("18.9", "\\$18.90", 1),
        ("1.234,50", "1,234.5", 1),
        ("12,34,567", 1234567, 1),
        ("1.234.567", 1234567, 1),
        ("100 200 300", 300, 1),
        ("100 200 300", 100200300, 1),
        ("100 200 300", 200300, 0),
        ("2\u00bd", 2.5, 1),
        ("\\frac{-1}{2}", -0.5, 1),
        ("5", "5 dollars", 1),
        ("-3", "x = -3", 1),
        ("-5", "- 5", 1),
        ("5", "- 5", 0),
        ("- 5\n- 6", 6, 1),
        ("#### - 6", -6, 1),
        ("\\boxed{- 5}", "\\boxed{- 5}", 1),
        ("5", "\\boxed{5\\text{ km/h}}", 1),
        ("12", "long 5 + 7 = 12 #### 12", 1),
    ],
)
def test_last_number_is_compared(completion: str, answer: Any, expected: float) -> None:
    assert integer_match(completion, {"answer": answer}) == expected


@given(text=st.text(st.sampled_from("e\u0301\uc0ac \u200d\u00e9x")), invisible=st.text("\u200b\u2060\ufeff"))
def test_texts_of_equal_look_match(text: str, invisible: str) -> None:
    gold = f"{invisible}\u00e9 {text}a{invisible}"
    forms = [unicodedata.normalize(form, gold) for form in ("NFC", "NFD")]
    assert all(text_match(left, {"answer": right}) == 1 for left in forms for right in forms)
    assert text_match(f"{gold}b", {"answer": gold}) == 0


@pytest.mark.parametrize("completion", ["7", "8", '["8", "7"]'])
def test_lists_in_texts_are_alternatives(completion: str) -> None:
    assert text_match(completion, {"answer": '["8", "7"]'}) == 1
    assert text_match(completion, {"answer": '["9", "6"'}) == 0


@pytest.mark.parametrize("reward", [integer_match, text_match])
@pytest.mark.parametrize(
    "answer",
    [None, "", " ", "\u200b", "\ufeff \u200d", [], [""], {"a": 1}, float("nan"), dt.date(2026, 1, 2), b"1"],
)
def test_meaningless_answers_are_problems(reward: Any, answer: Any) -> None:
    assert reward.check_answer(answer)
    with pytest.raises(RolloutError, match="the 'answer' of a sample is"):
        reward("1", {"answer": answer})


@pytest.mark.parametrize(
    "answer",
    [
        "5 and 7",
        "5,6",
        "2026-01-02",
        "Monday",
        "10:30",
        True,
        "5 million",
        "2 pi",
        "B2",
        "5x",
        "100 200 300",
        "--5",
        "- \\boxed{5}",
        "5-",
    ],
)
def test_other_texts_are_no_numbers(answer: Any) -> None:
    assert "not a number alone" in integer_match.check_answer(answer)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "value", [10**400, 1j, None, "1", (1.0,), {}, torch.ones(2), np.ones(2), 1e39, np.ma.masked]
)
def test_other_values_are_no_rewards(value: Any) -> None:
    with pytest.raises(RolloutError, match=r"^it returned .*\nfix: return a"):
        as_reward(value, "it")


@pytest.mark.parametrize(
    "value", [np.bool_(1), np.array([1.0]), torch.tensor(1.0), torch.ones(1), Decimal(1), True]
)
def test_single_elements_are_rewards(value: Any) -> None:
    assert as_reward(value, "it") == 1.0


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.decimals(), st.dates(),
    st.datetimes(), st.times(), st.timedeltas(), st.floats(width=32).map(np.float32),
)  # fmt: skip
NESTED = st.recursive(LEAVES, lambda v: st.lists(v) | st.dictionaries(st.text(), v) | st.tuples(v))


@given(NESTED)
def test_samples_are_strict_json(value: Any) -> None:
    json.dumps(json.loads(json_text(value), parse_constant=pytest.fail), allow_nan=False)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (WrittenFloat("0.50"), "0.50"),
        (float("nan"), "null"),
        (dt.timedelta(seconds=90), '"PT90S"'),
        (dt.datetime(2026, 1, 2, tzinfo=dt.UTC), '"2026-01-02T00:00:00+00:00"'),
        (np.array([1, 2]), "[1, 2]"),
        (np.datetime64("2026-01-02T03:04:05.000000001"), '"2026-01-02T03:04:05.000000001"'),
        ({1: b"\x89PNG"}, '{"1": "data:image/png;base64,iVBORw=="}'),
        ("\ud800é", '"\\ud800é"'),
    ],
)
def test_values_become_json(value: Any, text: str) -> None:
    assert json_text(value) == text
