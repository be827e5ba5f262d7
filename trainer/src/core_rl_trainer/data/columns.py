"""Columns by other names, and formats of other systems, as the fields that an example has here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.encoding import CHAT_FIELDS
from core_rl_trainer.data.examples import Example, Examples, answer_text
from core_rl_trainer.data.kinds import ExampleKind
from core_rl_trainer.data.messages import EMPTY, MARK_FIX, MARKS, MESSAGE_FIELDS, shortened
from core_rl_trainer.data.plain import CHAT, parsed_chats
from core_rl_trainer.data.turns import are_turns, as_turns, with_context, with_implicit_prompt

SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "query", "instruction", "problem", "input"),
    "answer": ("solution", "response", "output", "completion", "ground_truth", "target", "label"),
    "messages": ("conversation", "conversations", "dialog", "chat", "turns"),
    "chosen": (
        "preferred",
        "preferred_output",
        "accepted",
        "chosen_response",
        "response_chosen",
        "response_j",
    ),
    "rejected": (
        "dispreferred",
        "non_preferred_output",
        "rejected_response",
        "rejected_messages",
        "response_rejected",
        "response_k",
    ),
    "system": ("system_prompt", "system_message"),
}
"""Columns that other data sets have for a field."""
CHATS = ("prompt", "answer", "completion", "messages", "conversations", "chosen", "rejected")
"""Columns that may be chats."""
TEXTS_OF_JSON = (*CHAT_FIELDS, "history")
"""Further columns that may be JSON in a text."""
CONTINUED = ("input", "context")
"""Columns of Alpaca and Dolly that come after the ``instruction``."""
OUTPUTS = ("output", "response")
CONTEXT = ("system", "history")
"""Columns of LLaMA-Factory that come before a chat."""
REPLACED = "\0replaced"
"""The field with the names of columns whose place another one took; no column has this name."""
PLACEHOLDER = re.compile(r"<(bbox|ref-object)>")
"""The place of a box or a name of the column ``objects`` in a text of ms-swift."""
MOST = 600
"""Characters of the names of columns that an error lists."""
MEDIA_FIX = "no model is trained on it; remove the column"
WEIGHT_FIX = "no setting reads weights of rows: sources and messages have them; remove the column"
UNPAIRED_FIX = (
    "nothing here trains on unpaired preferences; for dpo, write 'chosen' and 'rejected' of each prompt in a row; for "
    "sft, remove the column, with the rows not to be imitated"
)
CONVERSIONS: Mapping[str, str] = {
    "input_ids": "core-rl encodes texts and messages itself: write them, or what tokenizer.decode gives of the ids; "
    "those with the label -100 are the prompt, the others, without the end token, the answer",
    "segments": "core-rl trains on texts and messages: write those with the label false as 'prompt', "
    "with true as 'answer'; several as 'messages'",
}
"""Columns of other systems that need a conversion, and which one."""
REFUSED: Mapping[str, tuple[object, str]] = {
    **dict.fromkeys(("video", "videos", "audio", "audios"), (None, MEDIA_FIX)),
    **dict.fromkeys(MARKS, (1, f"it marks turns: in the message of each, {MARK_FIX} here")),
    **dict.fromkeys(("weight", "loss_weight", "sample_weight"), (1, WEIGHT_FIX)),
    "functions": (None, "write data.columns.tools=functions where they are tools, or remove the column"),
    "margin": (0, "no loss reads a margin; remove the column"),
    "kto_tag": (None, UNPAIRED_FIX),
    "rejected_images": (None, "both sides of a pair have the images of 'images'; remove the column"),
}
"""Columns with a meaning in other systems that nothing here has: the value without an effect, and the remedy."""


def mapped(examples: Examples, columns: Mapping[str, str], kind: ExampleKind) -> Examples:
    """``examples`` in the fields of ``kind``; each row is converted from the format that it has.

    Text prompts are turns of the user where any row of the source has a column of `CONTEXT` or `CHAT_FIELDS`. Raises
    `ConfigError` for mapped columns that no row has.
    """
    chats = any(_has_context(row.example, columns) for row in examples.readable())
    formats: list[str | None] = []

    def convert(example: Example) -> Example:
        fields, name = _converted(_renamed(example, columns, kind), kind, chats)
        formats.append(name)
        return fields

    converted = replace(examples, rows=[row.converted(convert) for row in examples.rows])
    _check_columns(examples, columns, kind)
    return replace(converted, format=formats[0] if formats else None)


def _has_context(example: Example, columns: Mapping[str, str]) -> bool:
    empty = (*EMPTY, "[]", "{}", "null")
    sources = (columns.get(name, name) for name in (*CONTEXT, *CHAT_FIELDS))
    return any(_value(example, column) not in empty for column in sources if _has(example, column))


def unused_columns(
    example: Example, kind: ExampleKind, chat_format: ChatFormat, has_images: bool
) -> list[str]:
    """Columns of a converted example, and fields of its messages, with a value, that are not trained.

    The sample of the example may have images. Rewards read all columns of prompts; of those, the chat template does not
    get the variables that it reads.
    """
    if kind.name == "prompts":
        missed = chat_format.variables - {*CHAT_FIELDS, "messages"} if _is_chat(example.get("prompt")) else ()
        return [name for name, value in example.items() if name in missed and value not in EMPTY]
    used = {*kind.fields, *CHAT_FIELDS, REPLACED, *(("images", "image") if has_images else ())}
    if kind.name == "demonstrations" and not _lacks(example, "messages"):
        used = used - {*kind.fields} | {"messages"}
    elif kind.name == "demonstrations" and _lacks(example, "prompt"):
        used = used - {*kind.fields} | {"text"}
    columns = [name for name, value in example.items() if name not in used and value not in EMPTY]
    chats = {name: example[name] for name in used.intersection(CHATS) if isinstance(example.get(name), list)}
    fields = [
        f"{name}.{field}"
        for name, chat in chats.items()
        for field in {field for turn in chat for field in turn if turn[field] not in EMPTY} - MESSAGE_FIELDS
        if not chat_format.template(example).shows(chat, field)
    ]
    completions = [name for name in chats if name != "prompt" and chats[name][-1]["role"] != "assistant"]
    fields += [f"{name} after the last answer" for name in completions]
    return [*example.get(REPLACED, ()), *columns, *sorted(fields)]


def _renamed(example: Example, columns: Mapping[str, str], kind: ExampleKind) -> Example:
    """``example`` with fields from other ``columns``; rewards of prompts still see the original ones."""
    if not columns:
        return example
    try:
        fields = {name: _value(example, column) for name, column in columns.items()}
    except KeyError as error:
        raise BatchError(f"has no {error.args[0]!r}; it has {_names(example)}") from error
    taken = {column if column in example else column.split(".")[0] for column in columns.values()}
    replaced = {*columns, *(["messages"] if "prompt" in columns and "messages" not in columns else [])}
    if columns.get("prompt") == "instruction" and isinstance(fields["prompt"], str):
        del fields["prompt"]  # a row of Alpaca, with its input
        taken.remove("instruction")
    if kind.name == "prompts":
        return {name: value for name, value in example.items() if name not in replaced} | fields
    lost = [name for name in replaced - taken if not _lacks(example, name)]
    lost += _siblings(example, columns.values())
    rest = {name: value for name, value in example.items() if name not in taken | replaced}
    return {**rest, **fields, **({REPLACED: sorted(lost)} if lost else {})}


def _siblings(example: Example, columns: Iterable[str]) -> list[str]:
    """Names with a value beside the nested ``columns``, in the same mappings."""
    nested = {column.rpartition(".")[0] for column in columns if column not in example and "." in column}
    values = {f"{holder}.{name}": v for holder in nested for name, v in _value(example, holder).items()}
    return [name for name, value in values.items() if name not in columns and value not in EMPTY]


def _value(example: Example, column: str) -> Any:
    """The value of ``column``; dots lead into mappings. Raises `KeyError` with the column."""
    value: Any = example
    for part in [column] if column in example else column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(column)
        value = value[part]
    return value


def _has(example: Example, column: str) -> bool:
    try:
        _value(example, column)
    except KeyError:
        return False
    return True


def _check_columns(examples: Examples, columns: Mapping[str, str], kind: ExampleKind) -> None:
    rows = examples.readable()
    first = next((row.example for row in rows if row.example), Example())
    for name, column in columns.items() if rows else ():
        if not any(_has(row.example, column) for row in rows):
            fix = "Name one of them"
            if name in first:
                turned = f"Write data.columns.{column}={name}"
                fix = turned if column in kind.fields else f"Leave it out: {name!r} is one of them"
            raise ConfigError(
                f"{examples.origin}: data.columns takes {name!r} from the column {column!r}, and there is none; the "
                f"columns are {_names(first)}. {fix}"
            )


def check_fields(
    examples: Examples, converted: Examples, taken: Mapping[str, str], kind: ExampleKind
) -> None:
    """Raise `BatchError` with the settings that name columns, where no row has the needed ones."""
    rows = converted.readable()
    if not rows or any(kind.check(row.example) is None for row in rows):
        return
    row, *_ = rows
    missing = [name for name in kind.fields if _lacks(row.example, name)]
    if not missing or (kind.name == "demonstrations" and not _lacks(row.example, "messages")):
        return
    columns = examples.rows[row.number].example
    settings = [f"data.columns.{name}={_similar(name, columns) or 'COLUMN'}" for name in missing]
    chat = next((name for name in SYNONYMS["messages"] if _is_chat(columns.get(name))), None)
    if chat is not None and kind.name == "demonstrations":
        settings = [f"data.columns.messages={chat}"]
    if "system" not in taken and _lacks(columns, "system") and (system := _similar("system", columns)):
        settings.append(f"data.columns.system={system}")
    fixes = [fix for name, fix in CONVERSIONS.items() if any(column.endswith(name) for column in columns)]
    fix = fixes[0] if fixes else f"name those to take: {' '.join(settings)}"
    raise BatchError(
        f"{examples.origin}: {row.label} {kind.check(row.example)}. Needed: {kind.needs}. Its columns are "
        f"{_names(columns)}; {fix}"
    )


def _similar(name: str, columns: Example) -> str | None:
    """The column that other data sets have for the field ``name``; the messages in it, where it has any."""
    column = next((synonym for synonym in SYNONYMS.get(name, ()) if not _lacks(columns, synonym)), None)
    inner = columns.get(column or "")
    return f"{column}.messages" if isinstance(inner, Mapping) and "messages" in inner else column


def _is_chat(value: object) -> bool:
    return are_turns(value) or bool(isinstance(value, str) and CHAT.match(value))


def _names(example: Example) -> str:
    text = ", ".join(map(repr, example))
    return text if len(text) <= MOST else f"{text[:MOST]}… ({len(example)} columns)"


def _converted(example: Example, kind: ExampleKind, chats: bool) -> tuple[Example, str | None]:
    """``example`` in the fields of ``kind``, and the name of its format; `BatchError` without a subject."""
    for name, (neutral, fix) in REFUSED.items():
        refused = kind.name != "prompts" or fix == MEDIA_FIX
        if refused and example.get(name) not in (*EMPTY, neutral, str(neutral)):
            raise BatchError(f"has a column {name!r} ({shortened(example[name])}): {fix}")
    place = PLACEHOLDER.search(str([example.get(name) for name in CHATS]))
    if place and not _lacks(example, "objects"):
        raise BatchError(
            f"has {place[0]!r} in a text, and a column 'objects', from which nothing is put there; write its names and "
            "boxes into the texts, and remove the column"
        )
    result = {**example, **parsed_chats(example, (*CHATS, *TEXTS_OF_JSON))}
    for name in CHATS:
        value = result.get(name)
        turns = [value] if name in ("chosen", "rejected") and isinstance(value, Mapping) else value
        if isinstance(turns, list) and are_turns(turns):
            result[name] = as_turns(turns)
    format_name = _convert(result, kind)
    unpaired = {
        "demonstrations": not _lacks(result, "answer", "messages"),
        "preferences": _lacks(result, "chosen", "rejected"),
    }
    if unpaired.get(kind.name) and str(result.get("label")).lower() in ("true", "false"):
        raise BatchError(f"has a column 'label' of true or false, as TRL's KTO: {UNPAIRED_FIX}")
    if chats:
        _put_context(result, kind)
    if kind.name == "prompts":  # whose reward reads every column
        result = {**example, **result}
    return result, format_name


def _convert(result: Example, kind: ExampleKind) -> str | None:
    """Replace the columns of another system's format in ``result`` by fields; the name of the format."""
    if _lacks(result, "prompt", "messages") and isinstance(result.get("instruction"), str):
        parts = [result.pop(name) for name in ("instruction", *CONTINUED) if name in result]
        if not all(isinstance(part, str | None) for part in parts):
            raise BatchError(f"needs texts as 'instruction' and {' or '.join(map(repr, CONTINUED))}")
        result["prompt"] = "\n".join(filter(None, parts))
        if kind.name != "preferences":
            _take_answer(result, OUTPUTS)
        return "Alpaca"
    if _lacks(result, "prompt", "messages") and isinstance(result.get("conversations"), list):
        return _convert_chat(result, kind, "conversations") or "ShareGPT"
    if kind.name == "demonstrations":
        return _convert_demonstration(result)
    if _lacks(result, "prompt") and isinstance(result.get("messages"), list):
        return _convert_chat(result, kind, "messages")
    if kind.name == "prompts":
        return "verl" if "prompt" in result and _take_gold(result, result.get("reward_model")) else None
    return _convert_preference(result)


def _convert_chat(result: Example, kind: ExampleKind, column: str) -> str | None:
    """Take the chat in ``column`` as the field of ``kind``; that of a rollout or a pair ends before the answer."""
    if kind.name == "demonstrations":
        result["messages"] = result.pop(column)
        return None
    if not _begins_with_answer(result[column][-1:]):
        result["prompt"] = result.pop(column)
    elif kind.name == "prompts":
        raise BatchError(
            f"has {column!r} that end with a turn of the assistant; remove the turn, or write "
            f"data.columns.prompt={column} to have it continued"
        )
    elif _lacks(result, "chosen", *SYNONYMS["chosen"]):  # ms-swift: a column has the rejected answer or chat
        turns, rejected = result.pop(column), result.get("rejected")
        whole = are_turns(rejected) and not _begins_with_answer(rejected)
        result |= {"chosen": turns} if whole else {"prompt": turns[:-1], "chosen": turns[-1:]}
    if kind.name == "preferences":
        return _convert_preference(result)
    return "open-instruct" if _take_gold(result, result) else None


def _convert_preference(result: Example) -> str | None:
    completions = [result.get(name) for name in ("chosen", "rejected")]
    whole = all(are_turns(turns) for turns in completions)
    prompt = result.get("prompt")
    if isinstance(prompt, str) and whole and all(_begins_with_answer(turns) for turns in completions):
        result["prompt"] = [{"role": "user", "content": prompt}]
        return None
    if prompt is None and all(completions):
        apart = not whole or all(_begins_with_answer(turns) for turns in completions)
        column = (_similar("prompt", result) or _similar("messages", result)) if apart else None
        if column is not None and str(result[column]) not in str(completions[0]):
            raise BatchError(f"needs a 'prompt' for its 'chosen'; write data.columns.prompt={column}")
        result |= with_implicit_prompt(result)
        return "TRL preference with an implicit prompt"
    if whole and (
        isinstance(prompt, str) or (prompt and all(c[: len(prompt)] == prompt for c in completions if c))
    ):
        result |= with_implicit_prompt(result)
        return "preference with whole conversations"
    return None


def _begins_with_answer(turns: Any) -> bool:
    return are_turns(turns) and turns[0].get("role") == "assistant"


def _convert_demonstration(result: Example) -> str | None:
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


def _take_gold(result: Example, holder: object) -> bool:
    """Whether ``holder`` has a ``ground_truth``, which is the answer unless there is one."""
    if not isinstance(holder, Mapping) or _lacks(holder, "ground_truth"):
        return False
    if _lacks(result, "answer"):
        result["answer"] = holder["ground_truth"]
    return True


def _put_context(result: Example, kind: ExampleKind) -> None:
    """Put the columns of `CONTEXT` before the chat; a text prompt becomes a turn."""
    field = "messages" if kind.name == "demonstrations" and not _lacks(result, "messages") else "prompt"
    turns = result.get(field)
    if isinstance(turns, str) and turns:
        turns = [{"role": "user", "content": turns}]
    if not isinstance(turns, list):
        return
    system, history = result.pop("system", None), result.pop("history", None) or []
    if history and kind.name == "demonstrations" and field == "prompt" and not _lacks(result, "answer"):
        answer = result.pop("answer")  # answers of the history are trained, too
        if not isinstance(answer, list):
            answer = [{"role": "assistant", "content": answer_text(answer)}]
        del result["prompt"]
        field, turns = "messages", [*turns, *answer]
    result[field] = with_context(system, history, turns)


def _lacks(example: Mapping[str, Any], *names: str) -> bool:
    return all(example.get(name) in EMPTY for name in names)
