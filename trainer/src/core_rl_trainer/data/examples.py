"""Examples of training data: read from a JSONL file or a local dataset, and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from core_rl.errors import BatchError, ConfigError, raise_all

__all__ = [
    "Example",
    "ExampleCheck",
    "check_demonstration",
    "check_preference",
    "check_prompt",
    "read_examples",
    "read_jsonl",
]

Example = dict[str, Any]
ExampleCheck = Callable[[Example], str | None]
"""What is wrong with an example, or None."""

SHOWN = 10
"""Damaged examples that an error lists."""


def read_examples(path: Path, check: ExampleCheck) -> list[Example]:
    """The examples of a JSONL file, or of a directory that ``datasets.save_to_disk`` wrote.

    Raises `BatchError` that names every damaged example (the first ten), or when there is none, and
    `ConfigError` when ``datasets`` is needed and not installed.
    """
    return _checked(path, _read_dataset(path), check) if path.is_dir() else read_jsonl(path, check)


def read_jsonl(path: Path, check: ExampleCheck | None = None) -> list[Example]:
    """The objects in a JSONL file, by default with a ``prompt`` each. Raises as `read_examples`."""
    lines = enumerate(path.read_bytes().splitlines(), start=1)
    return _checked(
        path, ((f"line {number}", _parse_line(line)) for number, line in lines if line.strip()), check
    )


def _checked(
    path: Path, examples: Iterable[tuple[str, Example | str]], check: ExampleCheck | None
) -> list[Example]:
    found: list[Example] = []
    problems: list[str] = []
    for place, example in examples:
        problem = example if isinstance(example, str) else (check or check_prompt)(example)
        if problem is not None:
            problems.append(f"{place} {problem}")
        elif isinstance(example, dict):
            found.append(example)
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    raise_all(BatchError, str(path), problems[:SHOWN] + more)
    if not found:
        raise BatchError(f"{path} has no prompts; write one JSON object with a 'prompt' on each line")
    return found


def _read_dataset(path: Path) -> Iterator[tuple[str, Example | str]]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{path} is a directory, which the package 'datasets' reads: pip install 'core-rl[data]', or name a "
            "JSONL file"
        ) from error
    try:
        table = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{path} holds no dataset of datasets.save_to_disk: {error}") from error
    if not isinstance(table, datasets.Dataset):
        raise ConfigError(f"{path} holds the splits {sorted(table)}; name one of them, such as {path}/train")
    for number, example in enumerate(table):
        yield f"example {number}", dict(example)


def _parse_line(line: bytes) -> Example | str:
    """The object in ``line``, or what is wrong with it."""
    try:
        example = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"is not UTF-8: {error.reason} at byte {error.start}"
    except json.JSONDecodeError as error:
        return f"is not JSON: {error.msg} at column {error.colno}"
    return (
        example
        if isinstance(example, dict)
        else f"is a {type(example).__name__}; it must be an object with a 'prompt'"
    )


# ------------------------------------------------------------------- what an example must have


def check_prompt(example: Example) -> str | None:
    """A ``prompt``: a text, or chat messages."""
    prompt = example.get("prompt")
    if _is_text(prompt) or _is_chat(prompt):
        return None
    return f"needs a text 'prompt'; it has {prompt!r}"


def check_demonstration(example: Example) -> str | None:
    """A ``prompt`` and an ``answer``, or chat ``messages`` with a turn of the assistant."""
    if "messages" not in example:
        return check_prompt(example) or _answer_problem(example.get("answer"))
    messages = example["messages"]
    if not _is_chat(messages):
        return f"has 'messages' that are no list of objects with 'role' and 'content': {messages!r}"
    if not any(message["role"] == "assistant" for message in messages):
        return "has no turn of the 'assistant' in its 'messages': nothing to train"
    return None


def _answer_problem(answer: Any) -> str | None:
    if answer in (None, ""):
        return "needs an 'answer' or 'messages'"
    if not isinstance(answer, str | int | float):
        return f"needs a text or a number as 'answer'; it has {answer!r}"
    return None


def check_preference(example: Example) -> str | None:
    """A ``prompt``, and the completions ``chosen`` and ``rejected``, which differ."""
    problem = check_prompt(example)
    missing = [name for name in ("chosen", "rejected") if not _is_text(example.get(name))]
    if problem is None and missing:
        return f"needs a text {missing[0]!r}; it has {example.get(missing[0])!r}"
    if problem is None and example["chosen"] == example["rejected"]:
        return f"has the same text as 'chosen' and 'rejected': {example['chosen']!r}"
    return problem


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, Mapping)
            and _is_text(message.get("role"))
            and isinstance(message.get("content"), str)
            for message in value
        )
    )
