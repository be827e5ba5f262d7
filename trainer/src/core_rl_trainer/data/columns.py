"""Columns by other names, and formats of other systems, as the fields that an example has here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.examples import Example, Examples
from core_rl_trainer.data.formats import Format, recognised_format
from core_rl_trainer.data.json_text import parsed_chats
from core_rl_trainer.data.kinds import ExampleKind

__all__ = ["MappedExamples", "mapped"]

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "query", "instruction", "problem", "input", "user"),
    "answer": ("solution", "response", "output", "completion", "ground_truth", "target", "label"),
    "messages": ("conversation", "conversations", "dialog", "chat", "turns"),
    "chosen": ("preferred", "winner", "accepted", "better"),
    "rejected": ("dispreferred", "loser", "worse"),
}
"""Columns that other data sets have for a field."""
CHATS: Mapping[str, tuple[str, ...]] = {
    "prompts": (),
    "demonstrations": ("messages", "conversations", "completion"),
    "preferences": (),
}
"""By kind of examples, other fields that may be chats."""


class MappedExamples(Examples):
    """``examples`` with fields from other ``columns``, of the format ``found`` of another system, or of none."""

    def __init__(
        self, examples: Examples, columns: Mapping[str, str], kind: ExampleKind, found: Format | None
    ) -> None:
        self.origin = examples.origin
        self._examples = examples
        self._columns = columns
        self._kind = kind
        self._format = found

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Example:
        example = _with_chats(self._examples[index], self._columns, self._kind, self.label(index))
        if self._format is None or not self._format.recognises(example):
            return example
        try:
            return {**example, **self._format.convert(example)}
        except BatchError as error:
            raise BatchError(f"{self.label(index)} {error}") from error

    def label(self, index: int) -> str:
        return self._examples.label(index)


def mapped(examples: Examples, columns: Mapping[str, str], kind: ExampleKind) -> tuple[Examples, str | None]:
    """``examples`` in the fields of ``kind``, and the name of their format where it is another system's.

    The format is that of the first example. Raises `ConfigError` when its columns are not those that are needed.
    """
    if not len(examples):
        return examples, None
    try:
        first = examples[0]
    except BatchError:
        return MappedExamples(examples, columns, kind, None), None  # it is named with all damaged ones
    _check_columns(examples.origin, first, columns, kind)
    found = None
    try:
        found = recognised_format(_with_chats(first, columns, kind, examples.label(0)), kind)
        example = MappedExamples(examples, columns, kind, found)[0]
    except BatchError:
        pass  # it is named with all damaged ones
    else:
        _check_fields(examples, example, first, kind)
    return MappedExamples(examples, columns, kind, found), found.name if found else None


def _with_chats(example: Example, columns: Mapping[str, str], kind: ExampleKind, label: str) -> Example:
    """``example`` in the fields of ``kind``; chats and tools that are JSON in a text are parsed."""
    example = _renamed(example, columns, label)
    try:
        return {**example, **parsed_chats(example, (*kind.fields, *CHATS[kind.name], "tools"))}
    except BatchError as error:
        raise BatchError(f"{label} {error}") from error


def _renamed(example: Example, columns: Mapping[str, str], label: str) -> Example:
    if not columns:
        return example
    try:
        fields = {name: _value(example, column) for name, column in columns.items()}
    except KeyError as error:
        raise BatchError(f"{label} has no {error.args[0]!r}; it has {_names(example)}") from error
    kept = dict(example)
    if "prompt" in columns and "messages" not in columns:
        kept.pop("messages", None)  # which would be trained on instead of the prompt and its answer
    return {**kept, **fields}


def _value(example: Example, column: str) -> Any:
    """The value of ``column``; dots lead into mappings. Raises `KeyError` with the column."""
    value: Any = example
    for part in [column] if column in example else column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(column)
        value = value[part]
    return value


def _check_columns(origin: str, example: Example, columns: Mapping[str, str], kind: ExampleKind) -> None:
    """Raise `ConfigError` for mapped columns that there are not."""
    for name, column in columns.items():
        try:
            _value(example, column)
        except KeyError as error:
            fix = "Name one of them"
            if name in example:
                turned = column in kind.fields
                fix = (
                    f"Write data.columns.{column}={name}"
                    if turned
                    else f"Leave it out: {name!r} is one of them"
                )
            raise ConfigError(
                f"{origin}: data.columns takes {name!r} from the column {column!r}, and there is none; the columns "
                f"are {_names(example)}. {fix}"
            ) from error


def _check_fields(examples: Examples, example: Example, columns: Example, kind: ExampleKind) -> None:
    """Raise `BatchError` when the first example lacks a column, which is not the fault of one example."""
    problem = kind.check(example)
    if problem is None or example.get("messages") is not None:
        return
    if {"prompt", "completion", "label"} <= columns.keys() and kind.name == "demonstrations":
        problem += (
            " (and 'completion' with a 'label' is TRL's unpaired preference, which nothing here trains on)"
        )
    missing = [name for name in kind.fields if example.get(name) is None]
    if missing:
        settings = " ".join(f"data.columns.{name}={_similar(name, columns) or 'COLUMN'}" for name in missing)
        raise BatchError(
            f"{examples.origin}: {examples.label(0)} {problem}. Needed: {kind.needs}. Its columns are "
            f"{_names(columns)}; name those to take: {settings}"
        )


def _similar(name: str, columns: Example) -> str | None:
    """The column that other data sets have for the field ``name``."""
    return next((other for other in SYNONYMS.get(name, ()) if other in columns), None)


def _names(example: Example) -> str:
    return ", ".join(repr(name) for name in example)
