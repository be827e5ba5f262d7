"""Columns by other names, and formats of other systems, as the fields that an example has here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.examples import Example, Examples
from core_rl_trainer.data.json_text import parsed_chats
from core_rl_trainer.data.kinds import ExampleKind

__all__ = ["mapped"]

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
"""Further fields that may be chats, by kind of examples."""


def mapped(examples: Examples, columns: Mapping[str, str], kind: ExampleKind) -> Examples:
    """``examples`` in the fields of ``kind``, converted from another system's format.

    The first example has the format. Raises `ConfigError` when needed columns are missing.
    """
    if not len(examples):
        return examples
    try:
        first = examples[0]
    except BatchError:
        return _converted(examples, columns, kind, None)  # it is named with all damaged ones
    _check_columns(examples.origin, first, columns, kind)
    example_format = None
    try:
        example_format = _recognised_format(_with_chats(first, columns, kind, examples.label(0)), kind)
        example = _converted(examples, columns, kind, example_format)[0]
    except BatchError:
        pass  # it is named with all damaged ones
    else:
        _check_fields(examples, example, first, kind)
    return _converted(examples, columns, kind, example_format)


def _converted(
    examples: Examples, columns: Mapping[str, str], kind: ExampleKind, example_format: Format | None
) -> Examples:
    """``examples`` with fields from other ``columns``, of another system's ``example_format``, or of none."""

    def read(index: int) -> Example:
        label = examples.label(index)
        example = _with_chats(examples[index], columns, kind, label)
        if example_format is None or not example_format.recognises(example):
            return example
        try:
            return {**example, **example_format.convert(example)}
        except BatchError as error:
            raise BatchError(f"{label} {error}") from error

    return replace(examples, read=read, format=example_format.name if example_format else None)


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
    original = dict(example)
    if "prompt" in columns and "messages" not in columns:
        original.pop("messages", None)  # which would be trained on instead of the prompt and its answer
    return {**original, **fields}


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
    return next((synonym for synonym in SYNONYMS.get(name, ()) if synonym in columns), None)


def _names(example: Example) -> str:
    return ", ".join(repr(name) for name in example)


# --------------------------------------------------------------------- formats


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of another system."""

    name: str
    recognises: Callable[[Example], bool]
    convert: Callable[[Example], Example]
    """Converted fields, which replace or extend the fields of the example. Raises `BatchError` without a subject."""


def _has(*names: str, without: Sequence[str] = ()) -> Callable[[Example], bool]:
    return lambda example: (
        all(example.get(name) is not None for name in names)
        and all(example.get(name) is None for name in without)
    )


def _is_verl(example: Example) -> bool:
    rewarded = example.get("reward_model")
    return "prompt" in example and isinstance(rewarded, Mapping) and "ground_truth" in rewarded


def _from_verl(example: Example) -> Example:
    """The answer to compare with, unless there is one; everything else is there for the reward function."""
    return {"answer": example.get("answer", example["reward_model"]["ground_truth"])}


ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}


def _from_sharegpt(example: Example) -> Example:
    turns = [turn if isinstance(turn, Mapping) else {} for turn in example["conversations"]]
    return {
        "messages": [
            {"role": ROLES.get(turn.get("from", ""), turn.get("from")), "content": turn.get("value")}
            for turn in turns
        ]
    }


def _with_implicit_prompt(example: Example) -> Example:
    """The beginning that both completions share is the prompt, as in TRL's ``extract_prompt``.

    Turns of the assistant at its end belong to the completions. Raises `BatchError` where there is no beginning, or
    where a text ``prompt`` is no turn of it.
    """
    first, second, prompt = example["chosen"], example["rejected"], example.get("prompt")
    same = _common_length(first, second)
    if isinstance(first, str):
        same -= bool(same) and (
            first == second or first[same - 1] == " "
        )  # the blank before a word belongs to it
        return {"prompt": first[:same], "chosen": first[same:], "rejected": second[same:]}
    while same and isinstance(first[same - 1], Mapping) and first[same - 1].get("role") == "assistant":
        same -= 1
    if not same:
        raise BatchError("has conversations as 'chosen' and 'rejected' that do not begin with the same turns")
    if isinstance(prompt, str) and prompt.strip() not in _user_texts(first[:same]):
        raise BatchError(
            f"has a 'prompt' that is no turn of the user at the beginning of 'chosen' and 'rejected': {prompt!r}; "
            "correct it, or leave the column out"
        )
    return {"prompt": first[:same], "chosen": first[same:], "rejected": second[same:]}


def _common_length(first: Sequence[object], second: Sequence[object]) -> int:
    pairs = zip(first, second, strict=False)
    shorter = min(len(first), len(second))
    return next((n for n, (left, right) in enumerate(pairs) if left != right), shorter)


def _user_texts(turns: Sequence[object]) -> list[str]:
    """The texts of the user's turns, without blanks around them."""
    users = [turn for turn in turns if isinstance(turn, Mapping) and turn.get("role") == "user"]
    return [str(turn.get("content")).strip() for turn in users]


def _are_whole_conversations(example: Example) -> bool:
    """Whether ``chosen`` and ``rejected`` are lists of turns that contain the prompt, and not its continuations."""
    prompt, completions = example.get("prompt"), [example.get("chosen"), example.get("rejected")]
    if not all(isinstance(turns, list) and turns for turns in completions):
        return False
    if isinstance(prompt, list):
        return bool(prompt) and all(turns[: len(prompt)] == prompt for turns in completions if turns)
    return isinstance(prompt, str)


FORMATS: Mapping[str, tuple[Format, ...]] = {
    "prompts": (Format(name="verl", recognises=_is_verl, convert=_from_verl),),
    "demonstrations": (
        Format(
            name="TRL prompt-completion",
            recognises=_has("prompt", "completion", without=("answer", "messages", "label")),
            convert=lambda example: {"answer": example["completion"]},
        ),
        Format(
            name="TRL language modeling",
            recognises=_has("text", without=("prompt", "messages")),
            convert=lambda _: {},
        ),
        Format(
            name="ShareGPT",
            recognises=_has("conversations", without=("prompt", "messages")),
            convert=_from_sharegpt,
        ),
    ),
    "preferences": (
        Format(
            name="TRL preference with an implicit prompt",
            recognises=_has("chosen", "rejected", without=("prompt",)),
            convert=_with_implicit_prompt,
        ),
        Format(
            name="preference with whole conversations",
            recognises=_are_whole_conversations,
            convert=_with_implicit_prompt,
        ),
    ),
}
"""Formats of other systems, by kind of examples."""


def _recognised_format(example: Example, kind: ExampleKind) -> Format | None:
    """The format of another system that ``example`` has; None for the format of core-rl."""
    return next((candidate for candidate in FORMATS[kind.name] if candidate.recognises(example)), None)
