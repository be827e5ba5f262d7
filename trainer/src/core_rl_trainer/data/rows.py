"""Rows of training data: read from a JSONL file or a local dataset, and checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from core_rl.errors import BatchError, ConfigError, raise_all

__all__ = [
    "Row",
    "RowCheck",
    "check_demonstration",
    "check_preference",
    "check_prompt",
    "read_jsonl",
    "read_rows",
]

Row = dict[str, Any]
RowCheck = Callable[[Row], str | None]
"""What is wrong with a row, or None."""

SHOWN = 10
"""Damaged rows that an error lists."""


def read_rows(path: Path, check: RowCheck) -> list[Row]:
    """The rows of a JSONL file, or of a directory that ``datasets.save_to_disk`` wrote.

    Raises `BatchError` that names every damaged row (the first ten), or when there is none, and
    `ConfigError` when ``datasets`` is needed and not installed.
    """
    return _checked(path, _read_dataset(path), check) if path.is_dir() else read_jsonl(path, check)


def read_jsonl(path: Path, check: RowCheck | None = None) -> list[Row]:
    """The objects in a JSONL file, by default with a ``prompt`` each, without empty lines. Raises as `read_rows`."""
    lines = enumerate(path.read_bytes().splitlines(), start=1)
    return _checked(
        path, ((f"line {number}", _parse_line(line)) for number, line in lines if line.strip()), check
    )


def _checked(path: Path, rows: Iterable[tuple[str, Row | str]], check: RowCheck | None) -> list[Row]:
    found: list[Row] = []
    problems: list[str] = []
    for place, row in rows:
        problem = row if isinstance(row, str) else (check or check_prompt)(row)
        if problem is not None:
            problems.append(f"{place} {problem}")
        elif isinstance(row, dict):
            found.append(row)
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    raise_all(BatchError, str(path), problems[:SHOWN] + more)
    if not found:
        raise BatchError(f"{path} has no prompts; write one JSON object with a 'prompt' on each line")
    return found


def _read_dataset(path: Path) -> Iterator[tuple[str, Row | str]]:
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
    for number, row in enumerate(table):
        yield f"row {number}", dict(row)


def _parse_line(line: bytes) -> Row | str:
    """The object in ``line``, or what is wrong with it."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"is not UTF-8: {error.reason} at byte {error.start}"
    except json.JSONDecodeError as error:
        return f"is not JSON: {error.msg} at column {error.colno}"
    return (
        row if isinstance(row, dict) else f"is a {type(row).__name__}; it must be an object with a 'prompt'"
    )


# ------------------------------------------------------------------- what a row must have


def check_prompt(row: Row) -> str | None:
    """A ``prompt``: a text, or chat messages."""
    prompt = row.get("prompt")
    if _is_text(prompt) or _is_chat(prompt):
        return None
    return f"needs a text 'prompt'; it has {prompt!r}"


def check_demonstration(row: Row) -> str | None:
    """A ``prompt`` and an ``answer``, or chat ``messages`` with a turn of the assistant."""
    if "messages" not in row:
        return check_prompt(row) or _answer_problem(row.get("answer"))
    messages = row["messages"]
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


def check_preference(row: Row) -> str | None:
    """A ``prompt``, and the answers ``chosen`` and ``rejected``, which differ."""
    problem = check_prompt(row)
    missing = [name for name in ("chosen", "rejected") if not _is_text(row.get(name))]
    if problem is None and missing:
        return f"needs a text {missing[0]!r}; it has {row.get(missing[0])!r}"
    if problem is None and row["chosen"] == row["rejected"]:
        return f"has the same text as 'chosen' and 'rejected': {row['chosen']!r}"
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
