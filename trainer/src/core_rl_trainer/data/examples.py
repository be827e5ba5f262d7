"""Examples of training data, and checks of their fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from core_rl.errors import BatchError
from core_rl_trainer.data.messages import EMPTY, is_blank, message_problem, shortened

_Raw = TypeVar("_Raw")
Example = dict[str, Any]
ExampleCheck = Callable[[Example], str | None]
"""Returns the problem of an example, or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row of a source: an example, or the reason why there is none."""

    label: str
    """Its name in messages, such as ``line 3``."""
    number: int
    """Its number in the source, from 0."""
    example: Example = field(default_factory=dict)
    problem: str | None = None
    """The reason, as a phrase without a subject."""

    def read(self) -> Example:
        """The example. Raises `BatchError` with the label where there is none."""
        if self.problem is not None:
            raise BatchError(f"{self.label} {self.problem}")
        return self.example

    def converted(self, convert: Callable[[Example], Example]) -> Row:
        """The row with the result of ``convert``, or with the message of its `BatchError`."""
        if self.problem is not None:
            return self
        try:
            return replace(self, example=convert(self.example))
        except BatchError as error:
            return replace(self, example={}, problem=str(error))


@dataclass(frozen=True, kw_only=True)
class Examples:
    """The rows of one source, in memory."""

    origin: str
    """The name of the source, in messages."""
    rows: Sequence[Row]
    format: str | None = None
    """The name of another system's format, where the examples have it."""
    digest: str | None = None
    """The sha256 of all rows of the Hub; None where files have digests."""

    @staticmethod
    def parsed(origin: str, raw: Iterable[tuple[str, _Raw]], parse: Callable[[_Raw], Example]) -> Examples:
        """The rows that ``parse`` makes of ``raw``, each with its label."""
        rows = []
        for number, (label, content) in enumerate(raw):
            try:
                rows.append(Row(label=label, number=number, example=parse(content)))
            except BatchError as error:
                rows.append(Row(label=label, number=number, problem=str(error)))
        return Examples(origin=origin, rows=rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        return self.rows[index].read()

    def readable(self) -> list[Row]:
        """The rows that have an example."""
        return [row for row in self.rows if row.problem is None]


def joined(origin: str, parts: Sequence[Examples]) -> Examples:
    """The concatenated examples of all ``parts``, such as the files of a directory."""
    labelled = [(f"{Path(part.origin).name}: {row.label}", row) for part in parts for row in part.rows]
    rows = [replace(row, label=label, number=number) for number, (label, row) in enumerate(labelled)]
    return Examples(origin=origin, rows=rows)


def check_prompt(example: Example) -> str | None:
    """A ``prompt``: a text, or chat messages."""
    prompt = example.get("prompt")
    if _is_text(prompt):
        return None
    if isinstance(prompt, list) and prompt:
        problem = _chat_problem(prompt)
        return problem and f"has messages as 'prompt' {problem}"
    return f"needs a text 'prompt'; it has {shortened(prompt)}"


def check_demonstration(example: Example) -> str | None:
    """A ``prompt`` and an ``answer``, or chat ``messages`` with a turn of the assistant, or a ``text`` alone."""
    messages = example.get("messages")
    if messages is None:
        if example.get("prompt") is None and _is_text(example.get("text")):
            return None
        return check_prompt(example) or _answer_problem(example)
    if (problem := _chat_problem(messages)) is not None:
        return f"has 'messages' {problem}"
    if not any(message["role"] == "assistant" for message in messages):
        return "has no turn of the 'assistant' in its 'messages': nothing to train"
    return None


def _answer_problem(example: Example) -> str | None:
    answer = example.get("answer")
    if answer in (None, "", []):
        return "needs an 'answer' or 'messages'"
    if isinstance(answer, float) and not math.isfinite(answer):
        return f"needs a text or a number as 'answer'; it has {answer}"
    return (
        None if isinstance(answer, int | float) else _completion_problem(example, "answer", "or a number as ")
    )


def answer_text(answer: object) -> str:
    """An answer as text: numbers and truth values as JSON writes them, with the digits that the file has."""
    return str(answer).lower() if isinstance(answer, bool) else str(answer)


def check_preference(example: Example) -> str | None:
    """A ``prompt``, and the completions ``chosen`` and ``rejected``: texts, or turns after a chat."""
    for name in ("chosen", "rejected"):
        if _is_empty(example.get(name)):
            return f"needs a text {name!r}; it has {shortened(example.get(name))}"
    problems = (_completion_problem(example, name) for name in ("chosen", "rejected"))
    return check_prompt(example) or next(filter(None, problems), None)


def _completion_problem(example: Example, name: str, further: str = "") -> str | None:
    """A problem of a completion: it is a text, or turns, with some of the assistant, that can follow a chat."""
    completion, prompt = example[name], example["prompt"]
    if isinstance(completion, str):
        return None
    if not isinstance(completion, list) or not all(isinstance(turn, dict) for turn in completion):
        return f"needs a text {further}{name!r}; it has {shortened(completion)}"
    if (problem := _chat_problem(completion)) is not None:
        return f"has turns as {name!r} {problem}"
    roles = [turn["role"] for turn in completion]
    last = prompt[-1]["role"] if isinstance(prompt, list) else None
    repeats = roles[0] == "system" or roles[0] == last == "user"
    if last is not None and "assistant" in roles and not repeats:
        return None
    return f"has turns as {name!r} that cannot follow its 'prompt': {shortened(completion)}"


def _is_empty(completion: Any) -> bool:
    """Whether a completion has no text, reasoning or call of the assistant."""
    turns = [] if _chat_problem(completion) else [turn for turn in completion if turn["role"] == "assistant"]
    return all(map(is_blank, turns)) if turns else completion in EMPTY


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _chat_problem(value: Any) -> str | None:
    """A problem of chat messages, with the number of the first such message."""
    if not isinstance(value, list) or not value:
        return f"that are no list of objects with 'role' and 'content': {shortened(value)}"
    problems = ((number, message_problem(message)) for number, message in enumerate(value, 1))
    return next((f"whose message {number} has {text}" for number, text in problems if text), None)
