"""Chat messages: their text, marks of turns to train, and the forms in which templates take them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from core_rl.errors import BatchError

Message = Mapping[str, Any]

REASONING = ("reasoning_content", "reasoning", "thinking", "thought")
"""Fields of a message that hold its reasoning."""
MARKS = ("weight", "trainable", "train", "training", "loss", "loss_mask", "loss_scale")
"""Fields of a message that mark a turn as trained, 1, or not, 0."""
MARK = re.compile(r"train|loss|mask|weight|learn", re.IGNORECASE)
"""Part of the names of further such fields, whose values have no common meaning."""
MARK_FIX = "write 'weight' as 0 for a turn not to be trained, or remove it"
SHOWN_FIELDS = ("refusal", "function_call", "functions", "function_calls")
"""Fields of a message whose texts a template shows, or the message is refused."""
MESSAGE_FIELDS = frozenset(
    {"role", "content", "tool_calls", "tool_call_id", *MARKS, *REASONING, *SHOWN_FIELDS}
)
"""Fields of a message that are used or refused; the names of further ones are logged, once."""
IMAGE_FIX = "write {'type': 'image', 'image': PATH} among the parts of its 'content'"
REFUSED = {
    **dict.fromkeys(("images", "image", "image_url"), IMAGE_FIX),
    **dict.fromkeys(("video", "videos", "audio", "audios"), "no model is trained on it; remove it"),
}
"""Fields of a message, and of a text among its parts, with a meaning that nothing here has, and the remedy."""
PART_FIXES = {
    "tool_use": "write it as an entry of the message's 'tool_calls'",
    "tool_result": "write it as a message with the role 'tool'",
    **dict.fromkeys(("thinking", "reasoning"), "write its text as the message's 'reasoning_content'"),
}
"""Parts of other interfaces' contents, and the remedy."""
EMPTY: tuple[object, ...] = (None, "", [], {})
"""Values of a field without one, in tables."""
SHOWN = 200
"""Characters of a value that messages show."""


def message_text(message: Message) -> str:
    """The content of a message; the text parts of a list, joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def reasoning_of(message: Message) -> str:
    """The reasoning in a field of its own; empty where there is none."""
    return next((str(message[name]) for name in REASONING if message.get(name)), "")


def is_blank(message: Message) -> bool:
    """Whether a message has no text, in any field."""
    fields = (message_text(message), reasoning_of(message), message.get("tool_calls"))
    return not any((*fields, *map(message.get, SHOWN_FIELDS)))


def in_any_place(message: Message) -> Message:
    """``message`` with the texts that a template shows in any place of a chat: of a past turn it may drop some."""
    if message["role"] != "assistant":
        return message
    return {name: message[name] for name in ("role", "tool_calls", *SHOWN_FIELDS) if name in message}


def is_trained(message: Message) -> bool:
    """Whether a message is a turn of the assistant without a mark that excludes it from training.

    Raises `BatchError` for a mark of another value, and for a mark that trains a turn of another role.
    """
    marks = {name: message[name] for name in MARKS if message.get(name) is not None}
    for name, value in marks.items():
        if value not in (0, 1):
            raise BatchError(f"has a message with {name} = {value!r}; it must be 0 (not trained) or 1")
    if message["role"] == "assistant":
        return all(marks.values())
    if any(name != "weight" and value for name, value in marks.items()):
        raise BatchError(
            f"has a mark to train a turn of {message['role']!r}; only the assistant's are trained"
        )
    return False


def misplaced_reply(messages: Sequence[Message]) -> str | None:
    """The id of a tool's reply that comes before that of an earlier call of the same turn, or None."""
    waiting: list[str] = []
    for message in messages:
        waiting = [call["id"] for call in message.get("tool_calls") or () if call.get("id")] or waiting
        if (name := message.get("tool_call_id")) in waiting and name != waiting.pop(0):
            return str(name)
    return None


# ---------------------------------------------------------------------- checks


def shortened(value: object) -> str:
    """``value`` as Python prints it; of a long one, the beginning and its length."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text):,} characters)"


def message_problem(message: object) -> str | None:
    """A problem of a chat message, or None."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
        return f"no 'role' and 'content': {shortened(message)}"
    content, calls = message.get("content"), message.get("tool_calls")
    parts = content if isinstance(content, list) else ()
    problems = [_fields_problem(message), *map(_part_problem, parts)]
    if problem := next(filter(None, problems), None):
        return problem
    if content is None and not calls:
        return "no text as 'content'"
    if not isinstance(content, str | list | None):
        return f"no text as 'content', but {shortened(content)}"
    return None if calls is None else _calls_problem(calls)


def _fields_problem(message: Message) -> str | None:
    """A field with a meaning that nothing here has, or two of the same meaning that differ."""
    for name, value in message.items():
        fix = MARK_FIX if name not in MARKS and MARK.search(name) else REFUSED.get(name)
        if fix and value not in EMPTY:
            return f"a field {name!r} ({shortened(value)}), which is not read; {fix}"
    reasoning = [name for name in REASONING if message.get(name)]
    differ = len({str(message[name]) for name in reasoning}) > 1
    return f"{' and '.join(map(repr, reasoning))} that differ; remove either" if differ else None


def _part_problem(part: object) -> str | None:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        unread = [name for name, value in part.items() if value not in EMPTY and name not in ("type", "text")]
        return (
            f"a text with {unread[0]!r} among its parts; write it as a part, or remove it" if unread else None
        )
    kind = part.get("type") if isinstance(part, Mapping) else part
    fix = PART_FIXES.get(kind, "") if isinstance(kind, str) else ""
    return f"a part of its 'content' that is no text: {shortened(kind)}{fix and '; ' + fix}"


def _calls_problem(calls: object) -> str | None:
    if not isinstance(calls, list):
        return f"'tool_calls' that are no list of calls: {shortened(calls)}"
    for call in calls:
        function = _function_of(call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return f"a tool call without the name of a function: {shortened(call)}"
        if not isinstance(args := _arguments(function), Mapping):
            return f"a tool call with arguments that are no JSON object ({shortened(args)}); write them with json.dumps"
    return None


def _function_of(call: Mapping[str, Any]) -> Any:
    """The function of a tool call, with or without OpenAI's object around it."""
    return call.get("function", call)


# ----------------------------------------------------------------------- forms


def message_forms(
    messages: Sequence[Message], reasoning: str | None
) -> Iterator[tuple[list[dict[str, Any]], ...]]:
    """``messages`` in the forms that templates take, the most common first; without marks and absent fields.

    Content is a text or a list of parts, and the arguments of tool calls are an object or JSON text. Each pair of forms
    has missing content as an empty text and as null. Reasoning is in the field ``reasoning`` where it is given.
    """
    calls = any(message.get("tool_calls") for message in messages)
    blank = any(not message_text(message) for message in messages)
    for parts, as_text in product((False, True), (False, True)[: 1 + calls]):
        empties = ("", None) if blank else ("",)
        yield tuple(
            [_formed(message, parts, as_text, empty, reasoning) for message in messages] for empty in empties
        )


def _formed(
    message: Message, parts: bool, as_text: bool, empty: str | None, reasoning: str | None
) -> dict[str, Any]:
    formed = {name: value for name, value in message.items() if name not in MARKS and value is not None}
    text = message_text(message)
    formed["content"] = ([{"type": "text", "text": text}] if parts else text) if text else empty
    if reasoning is not None and (written := reasoning_of(message)):
        formed = {name: value for name, value in formed.items() if name not in REASONING}
        formed[reasoning] = written
    if calls := formed.pop("tool_calls", None):
        formed["tool_calls"] = [_formed_call(call, as_text) for call in calls]
    return formed


def _formed_call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    """A tool call in OpenAI's form, with arguments as an object or as JSON text."""
    function = _function_of(call)
    arguments = _arguments(function)
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    fields = call if "function" in call else {"type": "function"}
    return {**fields, "function": {**function, "arguments": arguments}}


def _arguments(function: Mapping[str, Any]) -> Any:
    """The arguments of a call; JSON text is read, and other text, which is refused, stays as it is."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments.strip() or "{}")
        except ValueError:
            return arguments
    return {} if arguments is None else arguments


# ----------------------------------------------------------------- shown text


def missing_text(message: Message, rendered: str) -> str | None:
    """A text of ``message`` that ``rendered`` does not show, with its field; blanks do not count."""
    shown = squeezed(rendered)
    texts = [("content", message_text(message)), ("reasoning", reasoning_of(message))]
    functions = map(_function_of, message.get("tool_calls") or ())
    calls = [{function["name"]: _arguments(function)} for function in functions]
    texts += [("tool_calls", text) for text in _leaves(calls)]
    texts += [(name, text) for name in SHOWN_FIELDS for text in _leaves(message.get(name))]
    return next((f"{name!r} ({text!r})" for name, text in texts if not _is_shown(text, shown)), None)


def _leaves(value: object) -> Iterator[str]:
    """The names and values of nested objects and lists."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            yield from map(str, value)
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
        elif not isinstance(value, bool | None):  # templates write those as Python or JSON has them
            yield str(value)


def _is_shown(text: str, shown: str) -> bool:
    """Whether ``shown`` has ``text``, as it is or as JSON escapes it."""
    escaped = (json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
    return any(squeezed(form) in shown for form in (text, *escaped))


def squeezed(text: str) -> str:
    """``text`` without blanks."""
    return "".join(text.split())
