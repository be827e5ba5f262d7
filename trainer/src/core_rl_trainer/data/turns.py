"""Turns of chats as other systems write them, in the form of OpenAI; and what two completions share."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from core_rl.errors import BatchError
from core_rl_trainer.data.examples import Example
from core_rl_trainer.data.messages import shortened
from core_rl_trainer.data.pieces import shared_length
from core_rl_trainer.data.plain import parse_json

ROLES: Mapping[str, tuple[str, ...]] = {
    "system": ("developer",),
    "user": ("human",),
    "assistant": ("gpt", "chatgpt", "model", "bot", "ai", "function_call", "tool_call"),
    "tool": ("observation", "tool_response", "function_response", "function", "ipython"),
}
"""Names of the roles in other data sets, in lower case."""
KNOWN = {alias: role for role, aliases in ROLES.items() for alias in (role, *aliases)}
CALLS = ("function_call", "tool_call")
"""Roles of turns whose text is the JSON of calls."""
FIRST_IDEOGRAPH = "\u2e80"
"""Scripts from here on do not separate words by blanks."""


def are_turns(value: object) -> bool:
    """Whether ``value`` is a list of turns with roles."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(turn, Mapping) and ("role" in turn or "from" in turn) for turn in value)


def as_turns(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``turns`` with ``role`` and ``content``. Raises `BatchError` without a subject for an unknown role."""
    return [_as_turn(turn, number) for number, turn in enumerate(turns, start=1)]


def _as_turn(turn: Mapping[str, Any], number: int) -> dict[str, Any]:
    fields = dict(turn)
    for alias, field in (("from", "role"), ("value", "content")):
        values = [value for value in (fields.pop(alias, None), fields.get(field)) if value is not None]
        if values and values[0] != values[-1]:
            raise BatchError(f"has {field!r} and {alias!r} in turn {number} that differ; remove either")
        fields[field] = values[0] if values else None  # a table may have both, and null in either
    name = str(fields["role"]).strip().lower()
    if name not in KNOWN:
        close = difflib.get_close_matches(name, KNOWN, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"write one of {', '.join(map(repr, ROLES))}"
        raise BatchError(f"has the unknown role {str(fields['role'])[:40]!r} in turn {number}; {hint}")
    if (call := fields.get("function_call")) and not fields.get("tool_calls"):
        fields |= {"function_call": None, "tool_calls": _calls(call, number)}  # of OpenAI's earlier API
    if name in CALLS:
        fields |= {"content": None, "tool_calls": _calls(fields.get("content"), number)}
    return {**fields, "role": KNOWN[name]}


def _calls(content: object, number: int) -> list[Any]:
    try:
        calls = parse_json(content) if isinstance(content, str) else content
    except BatchError as error:
        raise BatchError(f"has a call as turn {number} that {error}; write it with json.dumps") from error
    return calls if isinstance(calls, list) else [calls]


def with_context(system: object, history: object, turns: list[Any]) -> list[Any]:
    """``turns`` after a system message of ``system`` and the pairs of ``history``; either may be empty.

    Raises `BatchError` for other types, and where ``turns`` begin with another system message.
    """
    if not isinstance(system or "", str):
        raise BatchError(f"needs a text 'system'; it has {shortened(system)}")
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in history
    ):
        raise BatchError("has a 'history' that is no list of pairs of texts, a question and its answer")
    head = [turn for turn in turns[:1] if isinstance(turn, Mapping) and turn.get("role") == "system"]
    if head and system and head[0].get("content") != system:
        raise BatchError("has a 'system' that differs from the first message of its chat; remove either")
    rest = turns[len(head) :]
    if system and not head:
        head = [{"role": "system", "content": system}]
    for question, answer in history:
        head += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*head, *rest]


def with_implicit_prompt(example: Example) -> Example:
    """The beginning that both completions share is the prompt, as in TRL's ``extract_prompt``.

    A text is cut between words. Turns of the assistant at the end of the beginning belong to the completions. Raises
    `BatchError` where nothing is shared, where one completion begins the other, or where a text ``prompt`` is no turn.
    """
    first, second, prompt = example["chosen"], example["rejected"], example.get("prompt")
    if type(first) is not type(second) or not isinstance(first, str | list):
        raise BatchError("needs two texts or two chats as 'chosen' and 'rejected'")
    same = shared_length(first, second)
    if first == second:
        raise BatchError(
            "has equal 'chosen' and 'rejected': nothing can be learned from them; remove the row"
        )
    if same == min(len(first), len(second)):
        names = ("chosen", "rejected") if same == len(first) else ("rejected", "chosen")
        raise BatchError(
            f"has a {names[0]!r} that is the beginning of {names[1]!r}; remove the row, or add a 'prompt'"
        )
    if isinstance(first, str):
        # The last place that cuts no word of either text; the blank before a word belongs to it.
        while same and _is_inside(first[same - 1]) and (_is_inside(first[same]) or _is_inside(second[same])):
            same -= 1
        same -= same > 0 and first[same - 1] == " "
        if not first[:same].strip():
            raise BatchError(
                "has 'chosen' and 'rejected' that begin with nothing that they share; add a 'prompt'"
            )
        return {"prompt": first[:same], "chosen": first[same:], "rejected": second[same:]}
    while same and isinstance(first[same - 1], Mapping) and first[same - 1].get("role") == "assistant":
        same -= 1
    if not same:
        raise BatchError("has conversations as 'chosen' and 'rejected' that do not begin with the same turns")
    users = [turn for turn in first[:same] if isinstance(turn, Mapping) and turn.get("role") == "user"]
    if isinstance(prompt, str) and prompt.strip() not in [str(turn.get("content")).strip() for turn in users]:
        raise BatchError(
            f"has a 'prompt' that is no turn of the user at the beginning of 'chosen' and 'rejected': {prompt[:80]!r}; "
            "correct it, or leave the column out"
        )
    return {"prompt": first[:same], "chosen": first[same:], "rejected": second[same:]}


def _is_inside(letter: str) -> bool:
    """Whether ``letter`` is part of a word, or joined to the letter before."""
    joined = unicodedata.category(letter).startswith("M") or letter == "\u200d"
    return joined or (letter.isalnum() and letter < FIRST_IDEOGRAPH)
