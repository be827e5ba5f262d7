"""A user's sequences in place of the suite's: ``--data`` next to ``--model-dir``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer

from core_rl.backend.inference_backend import ModelLimits
from core_rl.errors import ConfigError, raise_all

FORMS = '[1, 2], {"input_ids": [1, 2]}, {"text": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
SHOWN = 5
"""Lines of an error."""


def read_sequences(path: Path, model: Path) -> tuple[tuple[int, ...], ...]:
    """Token ids of each line of the JSONL file ``path``; texts and chats by the tokenizer of ``model``.

    Raises one `ConfigError` with the lines that are no sequence, that the tokenizer refuses, or that ``model`` does
    not take.
    """
    option = f"--data={path}"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        limits = ModelLimits.of(AutoConfig.from_pretrained(model))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}, with the model in {model}: {str(error).splitlines()[0]}") from error
    problems, sequences = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            ids = _ids(json.loads(line), model)
        except (ValueError, TypeError, KeyError, OSError, TemplateError) as error:
            problems.append(f"line {number}: {str(error).splitlines()[0]}")
            continue
        problems += [f"line {number}: {problem}" for problem in _problems(ids, limits)]
        sequences.append(tuple(ids))
    raise_all(ConfigError, option, problems, most=SHOWN)
    if not sequences:
        raise ConfigError(f"{option}: it is empty; write one sequence in a line: {FORMS}")
    return tuple(sequences)


def _ids(value: Any, model: Path) -> Sequence[Any]:
    """Token ids of a line's ``value``; further fields of an object are not read."""
    if isinstance(value, dict) and "input_ids" in value:
        value = value["input_ids"]
    elif isinstance(value, dict) and isinstance(value.get("text"), str):
        value = _tokenizer(model)(value["text"])["input_ids"]
    elif isinstance(value, dict) and isinstance(value.get("messages"), list):
        value = _tokenizer(model).apply_chat_template(value["messages"], return_dict=True)["input_ids"]
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise ValueError(f"it has no token ids; write {FORMS}")
    return value


@cache
def _tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def _problems(ids: Sequence[int], limits: ModelLimits) -> list[str]:
    words, longest = limits.vocab_size, limits.context_length
    problems = [] if ids else ["it has no token"]
    if beyond := [token for token in ids if not 0 <= token < words]:
        problems.append(f"token id {beyond[0]} is not in the model's vocabulary of {words}")
    if longest is not None and len(ids) > longest:
        problems.append(f"it has {len(ids)} tokens; the model takes {longest}; shorten it")
    return problems
