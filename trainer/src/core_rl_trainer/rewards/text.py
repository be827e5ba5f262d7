"""Verifiable rewards on text, and rewards by name."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from core_rl.errors import BatchError, RolloutError
from core_rl_trainer.data.examples import answer_text
from core_rl_trainer.data.plain import parse_json, shown
from core_rl_trainer.data.tokenizers import all_end_tokens
from core_rl_trainer.rewards.calls import name_of
from core_rl_trainer.rewards.functions import load_callable
from core_rl_trainer.rewards.numbers import last_numbers, only_number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Reward = TypeVar("_Reward", bound=Callable[..., Any])
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"))
"""Characters of no width, such as byte-order marks."""
TEXTS = re.compile(r'\s*\[\s*"')
"""The beginning of a list of texts in JSON."""


class TextRewardFn(Protocol):
    """Scores the text of one completion; ``sample`` is the line of the JSONL file. May be a coroutine function.

    None: it does not apply to this sample. See `AnswerCheck` for its optional attribute ``check_answer``.
    """

    def __call__(
        self, completion: str, sample: Mapping[str, Any], /
    ) -> float | Awaitable[float | None] | None: ...


class BatchedTextRewardFn(Protocol):
    """Scores the texts of all completions of a prompt: a number for each. Otherwise as `TextRewardFn`."""

    def __call__(
        self, completions: list[str], sample: Mapping[str, Any], /
    ) -> Sequence[float | None] | Awaitable[Sequence[float | None]]: ...


class AnswerCheck(Protocol):
    """Optional attribute ``check_answer`` of a reward, which is called for every example before the run starts."""

    def __call__(self, answer: Any, /) -> str | None:
        """The problem of an example's ``answer``, such as "is empty"; None where the reward can compare with it."""


def checks_answers(check: AnswerCheck) -> Callable[[_Reward], _Reward]:
    """Decorator of a reward, whose ``check_answer`` is ``check``."""

    def decorate(reward: _Reward) -> _Reward:
        reward.check_answer = check  # type: ignore[attr-defined]
        return reward

    return decorate


def alternatives(answer: Any) -> list[Any]:
    """The answers of which one is expected: a list, also as verl's ``{"target": [...]}``, or a single one.

    A text may be a list of texts in JSON, as in tables.
    """
    if isinstance(answer, Mapping) and set(answer) == {"target"}:
        answer = answer["target"]
    if isinstance(answer, str) and TEXTS.match(answer):
        with suppress(BatchError):
            answer = parse_json(answer)
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    return list(answer) if isinstance(answer, list | tuple | set) else [answer]


def answer_problem(answer: Any, read: Callable[[Any], object], needs: str) -> str | None:
    """The problem of an ``answer``, of which ``read`` returns None for an alternative that is not what it ``needs``."""
    if answer is None:
        return "is missing"
    texts = alternatives(answer)
    wrong = [text for text in texts if (isinstance(text, str) and not text.strip()) or read(text) is None]
    if wrong or not texts:
        return f"is {shown(wrong[0] if wrong else answer, 80)}, and not {needs}"
    return None


def _text(answer: Any) -> str | None:
    """``answer`` as text; None for other types than texts, numbers and truth values, for NaN, and without a letter."""
    if not isinstance(answer, str | int | float | Decimal) or (
        isinstance(answer, float | Decimal) and not math.isfinite(answer)
    ):
        return None
    return _comparable(answer_text(answer)) or None


def _comparable(text: str) -> str:
    """``text`` in NFC, without white space around it and characters of no width."""
    return unicodedata.normalize("NFC", text.translate(_INVISIBLE)).strip()


def _number(answer: Any) -> Fraction | None:
    text = None if isinstance(answer, bool) else _text(answer)
    return None if text is None else only_number(text)


@checks_answers(lambda answer: answer_problem(answer, _text, "a text or a number"))
def text_match(completion: str, sample: Mapping[str, Any]) -> float:
    """1 if the completion is the sample's ``answer``, or among several answers; else 0.

    White space around it, characters of no width, and how a letter is composed (NFC, NFD) do not count.
    """
    answer = expected_answer(sample, text_match)
    return float(_comparable(completion) in map(_text, [answer, *alternatives(answer)]))


@checks_answers(lambda answer: answer_problem(answer, _number, "a number alone"))
def integer_match(completion: str, sample: Mapping[str, Any]) -> float:
    """1 if the last number in the completion equals the sample's ``answer``, or among several answers; else 0.

    Numbers are compared by value: ``3.0`` is 3, and ``3.5`` is neither 3 nor 5. See `last_numbers` for their forms: no
    expression is computed, ``5,6`` are two numbers, and ``50%`` is 50. The answer is a number alone, as of
    `only_number`.
    """
    answers = {_number(answer) for answer in alternatives(expected_answer(sample, integer_match))}
    return float(not answers.isdisjoint(last_numbers(completion)))


def expected_answer(sample: Mapping[str, Any], reward: object) -> Any:
    """The ``answer`` of a sample. Raises `RolloutError` where ``reward`` cannot compare with it."""
    answer = sample.get("answer")
    check: AnswerCheck | None = getattr(reward, "check_answer", None)
    if check is not None and (problem := check(answer)) is not None:
        raise RolloutError(
            f"the 'answer' of a sample {problem}; the sample has {sorted(sample)}\n"
            "fix: correct the answer, or name another reward"
        )
    return answer


def completion_text(
    tokenizer: PreTrainedTokenizerBase, output_ids: Sequence[int], skip_special_tokens: bool
) -> str:
    """The text of a completion: without special tokens, or with all of them but the end token that it stops at.

    Spaces stay as the model wrote them, also with tokenizers that clean them up before punctuation.
    """
    ids = list(output_ids)
    if not skip_special_tokens and ids and ids[-1] in all_end_tokens(tokenizer):
        ids.pop()
    return str(
        tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )


class TextReward:
    """A `TextRewardFn`, or a ``batched`` one, as a function of token ids; see `completion_text`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        tokenizer: PreTrainedTokenizerBase,
        skip_special_tokens: bool = True,
        batched: bool = False,
    ) -> None:
        self.__name__ = name_of(fn)
        self.__wrapped__ = self._fn = fn
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._batched = batched

    def __call__(
        self, prompt_ids: Sequence[int], output_ids: Sequence[Any], data: Mapping[str, Any], /
    ) -> Any:
        if self._batched:
            return self._fn([self._text(completion) for completion in output_ids], data)
        return self._fn(self._text(output_ids), data)

    def _text(self, output_ids: Sequence[int]) -> str:
        return completion_text(self._tokenizer, output_ids, self._skip_special_tokens)


@dataclass(frozen=True)
class NamedReward:
    """A `TextRewardFn` by its name in a recipe, so that it travels to other processes."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name.rpartition(":")[2]

    @property
    def __wrapped__(self) -> TextRewardFn:
        return _loaded(self.name)

    def __call__(
        self, completion: str, sample: Mapping[str, Any], /
    ) -> float | Awaitable[float | None] | None:
        """Load the function, the first time, and call it."""
        return _loaded(self.name)(completion, sample)


@cache
def _loaded(name: str) -> TextRewardFn:
    function: TextRewardFn = load_callable("reward", name)
    return function
