"""Verifiable rewards on text, and rewards by name."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from core_rl.errors import RolloutError
from core_rl_trainer.data.examples import answer_text
from core_rl_trainer.data.tokenizers import all_end_tokens
from core_rl_trainer.rewards.calls import name_of
from core_rl_trainer.rewards.functions import load_callable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "BatchedTextRewardFn",
    "NamedReward",
    "TextReward",
    "TextRewardFn",
    "completion_text",
    "expected_answer",
    "integer_match",
    "text_match",
]

_INTEGER = re.compile(r"[-+]?\d+")


class TextRewardFn(Protocol):
    """Scores the text of one completion; ``sample`` is the line of the JSONL file. May be a coroutine function."""

    def __call__(self, completion: str, sample: Mapping[str, Any], /) -> float | Awaitable[float]: ...


class BatchedTextRewardFn(Protocol):
    """Scores the texts of all completions of a prompt: a number for each. Otherwise as `TextRewardFn`."""

    def __call__(
        self, completions: list[str], sample: Mapping[str, Any], /
    ) -> Sequence[float] | Awaitable[Sequence[float]]: ...


def text_match(completion: str, sample: Mapping[str, Any]) -> float:
    """1 if the completion is the sample's ``answer``, up to white space around it; else 0."""
    return float(completion.strip() == answer_text(expected_answer(sample)).strip())


def integer_match(completion: str, sample: Mapping[str, Any]) -> float:
    """1 if the last integer in the completion is the sample's ``answer``; else 0."""
    integers = _INTEGER.findall(completion.replace(",", ""))
    return float(bool(integers) and int(integers[-1]) == int(expected_answer(sample)))


def expected_answer(sample: Mapping[str, Any]) -> Any:
    """The ``answer`` of a sample; `RolloutError` where it has none."""
    if sample.get("answer") is None:
        raise RolloutError(
            f"a sample has no 'answer' to compare with; it has {sorted(sample)}\n"
            "fix: name another reward, or add the field"
        )
    return sample["answer"]


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
    """A `TextRewardFn` as a `RewardFn`, which sees token ids; see `completion_text`.

    With ``batched`` it is a `BatchedTextRewardFn` as a `BatchedRewardFn`.
    """

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

    def __call__(self, completion: str, sample: Mapping[str, Any], /) -> float | Awaitable[float]:
        """Load the function, the first time, and call it."""
        return _loaded(self.name)(completion, sample)


@cache
def _loaded(name: str) -> TextRewardFn:
    function: TextRewardFn = load_callable("reward", name)
    return function
