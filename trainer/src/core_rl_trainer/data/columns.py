"""Columns by other names, and formats of other systems, as the fields that an example has here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.examples import Example, Examples
from core_rl_trainer.data.json_text import parsed_chats
from core_rl_trainer.data.kinds import ExampleKind
from core_rl_trainer.data.turns import are_turns, as_turns, with_implicit_prompt, with_system

__all__ = ["mapped", "unused_columns"]

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "query", "instruction", "problem", "input", "user"),
    "answer": ("solution", "response", "output", "completion", "ground_truth", "target", "label"),
    "messages": ("conversation", "conversations", "dialog", "chat", "turns"),
    "chosen": ("preferred", "winner", "accepted", "better"),
    "rejected": ("dispreferred", "loser", "worse"),
}
"""Columns that other data sets have for a field."""
CHATS = ("prompt", "answer", "completion", "messages", "conversations", "chosen", "rejected")
"""Columns that may be chats."""
TEXTS_OF_JSON = ("tools", "documents", "chat_template_kwargs", "history")
"""Further columns that may be JSON in a text."""
CONTINUED = ("input", "context")
"""Columns of Alpaca and Dolly that come after the ``instruction``."""
OUTPUTS = ("output", "response")
CHAT_FIELDS = ("tools", "documents", "chat_template_kwargs", "images")
"""Fields that belong to the prompt of every kind."""
REFUSED: Mapping[str, str] = {
    "functions": "write data.columns.tools=functions where they are tools",
    "margin": "no loss reads a margin; remove the column, or rename it",
    "video": "no model is trained on videos; remove the column",
    "videos": "no model is trained on videos; remove the column",
    "audio": "no model is trained on audio; remove the column",
    "audios": "no model is trained on audio; remove the column",
}
"""Columns with a meaning in other systems that nothing here has, and what to do."""


def mapped(examples: Examples, columns: Mapping[str, str], kind: ExampleKind) -> Examples:
    """``examples`` in the fields of ``kind``; each row is converted from the format that it has.

    Raises `ConfigError` and `BatchError` when columns are missing that no row has.
    """

    def read(index: int) -> Example:
        label = examples.label(index)
        example = _renamed(examples[index], columns, label, kind)
        try:
            return _converted(example, kind)[0]
        except BatchError as error:
            raise BatchError(f"{label} {error}") from error

    converted = replace(examples, read=read)
    _check_columns(examples, columns, kind)
    _check_fields(examples, converted, kind)
    return replace(converted, format=_first_format(examples, columns, kind))


def _readable(examples: Examples) -> Iterator[tuple[int, Example]]:
    for index in range(len(examples)):
        with suppress(BatchError):  # it is named with all damaged ones
            yield index, examples[index]


def _first_format(examples: Examples, columns: Mapping[str, str], kind: ExampleKind) -> str | None:
    """The format of another system that the first row has."""
    for _, example in islice(_readable(examples), 1):
        with suppress(BatchError):
            return _converted(_renamed(example, columns, "", kind), kind)[1]
    return None


def unused_columns(example: Example, kind: ExampleKind) -> list[str]:
    """Columns of a converted example, with a value, that are not trained; none of prompts, which rewards read."""
    if kind.name == "prompts":
        return []
    used = set(kind.fields)
    if kind.name == "demonstrations" and example.get("messages") is not None:
        used = {"messages"}
    elif kind.name == "demonstrations" and example.get("prompt") is None:
        used = {"text"}
    empty: tuple[object, ...] = (None, "", [], {})
    return [
        name for name, value in example.items() if name not in used | {*CHAT_FIELDS} and value not in empty
    ]


def _renamed(example: Example, columns: Mapping[str, str], label: str, kind: ExampleKind) -> Example:
    """``example`` with fields from other ``columns``; rewards of prompts still see the original ones."""
    if not columns:
        return example
    try:
        fields = {name: _value(example, column) for name, column in columns.items()}
    except KeyError as error:
        raise BatchError(f"{label} has no {error.args[0]!r}; it has {_names(example)}") from error
    if columns.get("prompt") == "instruction":
        fields["prompt"] = _continued({**example, **fields, "instruction": fields["prompt"]})
    taken = {column if column in example else column.split(".")[0] for column in columns.values()}
    taken |= {*CONTINUED} - columns.keys() if columns.get("prompt") == "instruction" else set()
    original = (
        dict(example) if kind.name == "prompts" else {n: v for n, v in example.items() if n not in taken}
    )
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


def _check_columns(examples: Examples, columns: Mapping[str, str], kind: ExampleKind) -> None:
    """Raise `ConfigError` for mapped columns that no row has."""
    for name, column in columns.items():
        first: Example | None = None
        for _, example in _readable(examples):
            try:
                _value(example, column)
            except KeyError:
                first = first or example
            else:
                break
        else:
            if first is None:
                return
            fix = "Name one of them"
            if name in first:
                turned = f"Write data.columns.{column}={name}"
                fix = turned if column in kind.fields else f"Leave it out: {name!r} is one of them"
            raise ConfigError(
                f"{examples.origin}: data.columns takes {name!r} from the column {column!r}, and there is none; the "
                f"columns are {_names(first)}. {fix}"
            )


def _check_fields(examples: Examples, converted: Examples, kind: ExampleKind) -> None:
    """Raise `BatchError` with the settings that name columns, where no row has the needed ones."""
    first: tuple[int, Example] | None = None
    for index, example in _readable(converted):
        if kind.check(example) is None or example.get("messages") is not None:
            return
        first = first or (index, example)
    if first is None:
        return
    index, example = first
    columns = examples[index]
    chat = next((name for name in SYNONYMS["messages"] if are_turns(columns.get(name))), None)
    missing = [name for name in kind.fields if example.get(name) is None]
    settings = " ".join(f"data.columns.{name}={_similar(name, columns) or 'COLUMN'}" for name in missing)
    if chat is not None and kind.name == "demonstrations":
        settings = f"data.columns.messages={chat}"
    if missing:
        raise BatchError(
            f"{examples.origin}: {examples.label(index)} {kind.check(example)}. Needed: {kind.needs}. Its columns are "
            f"{_names(columns)}; name those to take: {settings}"
        )


def _similar(name: str, columns: Example) -> str | None:
    """The column that other data sets have for the field ``name``."""
    return next((synonym for synonym in SYNONYMS.get(name, ()) if synonym in columns), None)


def _names(example: Example) -> str:
    return ", ".join(repr(name) for name in example)


# --------------------------------------------------------------------- formats


def _converted(example: Example, kind: ExampleKind) -> tuple[Example, str | None]:
    """``example`` in the fields of ``kind``, and the name of the format that it has; without the converted columns.

    Raises `BatchError` without a subject.
    """
    for name, fix in REFUSED.items():
        if example.get(name) and (kind.name != "prompts" or name.startswith(("video", "audio"))):
            raise BatchError(f"has a column {name!r}: {fix}")
    result = {**example, **parsed_chats(example, (*CHATS, *TEXTS_OF_JSON))}
    _replace_turns(result)
    format_name = _convert(result, kind)
    _put_context(result, kind)
    if kind.name == "prompts":  # whose reward reads every column
        result = {**example, **result}
    return result, format_name


def _replace_turns(result: Example) -> None:
    for name in CHATS:
        value = result.get(name)
        if name in ("chosen", "rejected") and isinstance(value, Mapping) and result.get("conversations"):
            value = [value]
        if isinstance(value, list) and are_turns(value):
            result[name] = as_turns(value)


def _convert(result: Example, kind: ExampleKind) -> str | None:
    """Replace the columns of another system's format in ``result`` by fields; the name of the format."""
    if _lacks(result, "prompt", "messages"):
        if isinstance(result.get("instruction"), str):
            result["prompt"] = _continued(result)
            for name in ("instruction", *CONTINUED):
                result.pop(name, None)
            _take_answer(result, OUTPUTS)
            return "Alpaca"
        if result.get("conversations") is not None:
            field = "messages" if kind.name == "demonstrations" else "prompt"
            result[field] = result.pop("conversations")
            return "ShareGPT"
    if kind.name == "prompts":
        return "verl" if _take_verl_answer(result) else None
    if kind.name == "demonstrations":
        return _convert_demonstration(result)
    return _convert_preference(result)


def _convert_preference(result: Example) -> str | None:
    completions = [result.get(name) for name in ("chosen", "rejected")]
    whole = all(isinstance(turns, list) and turns for turns in completions)
    prompt = result.get("prompt")
    if prompt is None and all(completions):
        result |= with_implicit_prompt(result)
        return "TRL preference with an implicit prompt"
    if whole and (
        isinstance(prompt, str) or (prompt and all(c[: len(prompt)] == prompt for c in completions if c))
    ):
        result |= with_implicit_prompt(result)
        return "preference with whole conversations"
    return None


def _convert_demonstration(result: Example) -> str | None:
    if (
        not _lacks(result, "label")
        and not _lacks(result, "completion")
        and _lacks(result, "messages", "answer")
    ):
        raise BatchError(
            "has a 'label' beside 'completion', which is TRL's unpaired preference, which nothing here trains on: "
            "remove the column, with the rows that are not to be imitated"
        )
    if not _lacks(result, "prompt") and _lacks(result, "messages"):
        return "TRL prompt-completion" if _take_answer(result, ("completion",)) else None
    return "TRL language modeling" if not _lacks(result, "text") and _lacks(result, "messages") else None


def _take_answer(result: Example, names: Sequence[str]) -> bool:
    """Whether the answer comes from any of the columns ``names``."""
    name = next((name for name in names if not _lacks(result, name)), None)
    if name is None or not _lacks(result, "answer"):
        return False
    result["answer"] = result.pop(name)
    return True


def _take_verl_answer(result: Example) -> bool:
    """Whether there is verl's ``reward_model``; the answer is its ground truth, unless there is one."""
    rewarded = result.get("reward_model")
    if "prompt" not in result or not isinstance(rewarded, Mapping) or "ground_truth" not in rewarded:
        return False
    result.setdefault("answer", rewarded["ground_truth"])
    return True


def _continued(example: Example) -> str:
    """The instruction of Alpaca, and its input on the next line."""
    parts = [example[name] for name in ("instruction", *CONTINUED) if example.get(name)]
    if not all(isinstance(part, str) for part in parts):
        raise BatchError(f"needs texts as 'instruction' and {' or '.join(map(repr, CONTINUED))}")
    return "\n".join(parts)


def _put_context(result: Example, kind: ExampleKind) -> None:
    """Put the columns ``system`` and ``history`` of LLaMA-Factory before the chat; a text prompt becomes a turn."""
    if not {"system", "history"} & result.keys() or _lacks(result, "prompt", "messages"):
        return
    system, history = result.pop("system", None), result.pop("history", None) or []
    field = "prompt" if _lacks(result, "messages") else "messages"
    turns = result[field]
    if isinstance(turns, str):
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list):
        return
    earlier = _earlier_turns(history)
    if earlier and kind.name == "demonstrations" and field == "prompt":  # whose answers are trained, too
        answer = result.pop("answer", None)
        after = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
        del result["prompt"]
        field, turns = "messages", [*turns, *after]
    turns = [*earlier, *turns]
    result[field] = with_system(system, turns) if system else turns


def _earlier_turns(history: object) -> list[dict[str, Any]]:
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise BatchError("has a 'history' that is no list of pairs of a question and its answer")
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text} for pair in history for role, text in zip(roles, pair, strict=True)
    ]


def _lacks(example: Example, *names: str) -> bool:
    return all(example.get(name) is None for name in names)
