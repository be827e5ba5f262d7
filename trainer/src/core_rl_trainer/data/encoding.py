"""Token ids of prompts, completions and chats: one beginning-of-sequence token, and an end that is trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.examples import answer_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Encoded",
    "encode_chat",
    "encode_completion",
    "encode_demonstration",
    "encode_prompt",
    "encode_text",
    "refuse_open_turn",
]

Messages = Sequence[Mapping[str, Any]]
MARKS = ("weight", "trainable", "train")
"""Fields of a message that mark a turn as trained, 1, or not, 0."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold its reasoning."""
Encoded = tuple[list[int], list[bool]]
"""Token ids of a sequence, and which of them are trained."""


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, tools: object = None
) -> list[int]:
    """Token ids of ``prompt``, ready to be continued; messages go through the tokenizer's chat template.

    ``tools`` are the schemas of functions that a chat may call.
    There is one beginning-of-sequence token where the tokenizer puts it, even if the text spells it out as well.
    There is no end-of-sequence token at the end. Raises `ConfigError` for messages where the tokenizer has no chat
    template.
    """
    if not isinstance(prompt, str):
        return _chat_ids(tokenizer, prompt, tools, to_be_continued=True)
    _refuse_tools(tools)
    return _without_eos(tokenizer, _one_bos(tokenizer, tokenizer(prompt)["input_ids"]))


def encode_completion(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Messages,
    completion: str | Messages,
    tools: object = None,
) -> Encoded:
    """``prompt`` and ``completion`` as one sequence; the completion and an end-of-sequence token are trained.

    After a chat, the completion is the assistant's next turn, or several turns, of which the assistant's are trained.
    """
    if not isinstance(prompt, str):
        if isinstance(completion, str):
            refuse_open_turn(prompt)
        turns = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        return encode_chat(tokenizer, [*prompt, *turns], len(prompt), tools)
    assert isinstance(completion, str)  # turns come after a chat
    start = encode_prompt(tokenizer, prompt, tools)
    return _continued(tokenizer, start, completion)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoded:
    """A whole text; all of it and an end-of-sequence token are trained, but for the beginning-of-sequence token."""
    bos = tokenizer.bos_token_id
    start = [bos] if encode_prompt(tokenizer, text)[:1] == [bos] else []
    return _continued(tokenizer, start, text.removeprefix(str(tokenizer.bos_token or "")))


def _continued(tokenizer: PreTrainedTokenizerBase, start: list[int], text: str) -> Encoded:
    """``start``, and ``text`` with an end-of-sequence token, which are trained."""
    trained = _without_eos(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])
    end = _end(tokenizer)
    if trained[-1:] != [end]:
        trained = [*trained, end]
    return start + trained, [False] * len(start) + [True] * len(trained)


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, first: int = 0, tools: object = None
) -> Encoded:
    """A whole conversation; the turns of the assistant from message ``first`` on are trained, but for marked ones.

    What the template writes after the last end-of-sequence token of the last turn (a line feed) is cut off. Raises
    `BatchError` where the template rewrites earlier turns when later ones come, so that a turn's tokens are
    not those that the model would be shown, and where it drops text of a turn.
    """
    turns = [n for n in range(first, len(messages)) if _is_trained(messages[n])]
    if not turns:
        raise BatchError("has no turn of the assistant to train: all are marked not to be trained")
    ids = _chat_ids(tokenizer, messages[: turns[-1] + 1], tools, to_be_continued=False)
    mask = [False] * len(ids)
    for number in turns:
        before = _chat_ids(tokenizer, messages[:number], tools, to_be_continued=True) if number else []
        after = _chat_ids(tokenizer, messages[: number + 1], tools, to_be_continued=False)
        if after[: len(before)] != before or ids[: len(after)] != after:
            raise BatchError(
                f"the chat template rewrites what comes before message {number}; train on the last turn "
                "alone ('prompt' and 'answer'), or fix the template"
            )
        mask[len(before) : len(after)] = [True] * (len(after) - len(before))
    return _ended(tokenizer, ids, mask)


def encode_demonstration(tokenizer: PreTrainedTokenizerBase, example: Mapping[str, Any]) -> Encoded:
    """An example with ``messages``, with ``prompt`` and ``answer``, or with a ``text`` alone."""
    tools = example.get("tools")
    if example.get("messages") is not None:
        return encode_chat(tokenizer, example["messages"], tools=tools)
    if example.get("prompt") is None:
        _refuse_tools(tools)
        return encode_text(tokenizer, example["text"])
    answer = example["answer"]
    return encode_completion(
        tokenizer, example["prompt"], answer if isinstance(answer, list) else answer_text(answer), tools
    )


def _ended(tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[bool]) -> Encoded:
    """With a trained end-of-sequence token as the last one."""
    end = _end(tokenizer)
    start = max((n + 1 for n, trained in enumerate(mask) if not trained), default=0)
    places = [n for n in range(start, len(ids)) if ids[n] == end]
    if places:
        return ids[: places[-1] + 1], mask[: places[-1] + 1]
    return [*ids, end], [*mask, True]


def _is_trained(message: Mapping[str, Any]) -> bool:
    """Whether a message is a turn of the assistant without a mark that excludes it from training."""
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


def _chat_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: object, *, to_be_continued: bool
) -> list[int]:
    template = _template(tokenizer)
    try:
        text = str(
            tokenizer.apply_chat_template(
                [_rendered(message) for message in messages],
                tools=_schemas(tools, template),
                add_generation_prompt=to_be_continued,
                tokenize=False,
            )
        )
    except (TemplateError, TypeError) as error:  # a template adds a text and what is none
        raise BatchError(f"the chat template refuses these messages: {error}") from error
    if not to_be_continued:
        _check_shown(messages[-1], text)
    return _one_bos(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of the chat template. Raises `ConfigError` where there is none to use."""
    template = tokenizer.chat_template
    if not template:
        raise ConfigError(
            f"{tokenizer.name_or_path!r}: its tokenizer has no chat template, and the data has chat messages; add a "
            "chat_template.jinja to the model's directory, or write each prompt as a text"
        )
    if isinstance(template, str):
        return template
    if "default" not in template:
        raise ConfigError(
            f"{tokenizer.name_or_path!r}: its tokenizer has the chat templates {', '.join(map(repr, template))} and "
            "none called 'default'; save the template to train with as chat_template.jinja in the model's directory"
        )
    return " ".join(template.values())


def _rendered(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates take it: without marks, and with a text as its content."""
    fields = {name: value for name, value in message.items() if name not in MARKS}
    return {**fields, "content": message.get("content") or ""}


def _schemas(tools: object, template: str) -> list[Any] | None:
    """The schemas of ``tools``, also from JSON text. Raises `BatchError` where the template does not show them."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BatchError(f"has 'tools' that are no JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BatchError(f"has 'tools' that are no list of schemas: {tools!r}")
    if "tools" not in template:
        raise BatchError(
            "has 'tools', which the chat template does not show to the model; take a template that reads them, or "
            "remove the column"
        )
    return tools


def refuse_open_turn(prompt: str | Messages) -> None:
    """Raise `BatchError` for a prompt behind whose last turn the template would open a second one."""
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        raise BatchError("has a 'prompt' that ends with a turn of the assistant; end it with the turn before")


def _refuse_tools(tools: object) -> None:
    """Raise `BatchError` for tools of a text, which has no template to show them."""
    if tools:
        raise BatchError("has 'tools' and a text; tools need chat messages, which the chat template renders")


def _check_shown(message: Mapping[str, Any], rendered: str) -> None:
    """Raise `BatchError` where a rendered chat drops text of its last message; blanks do not count."""
    shown = "".join(rendered.split())
    for name in ("content", *REASONING):
        text = str(message.get(name) or "")
        if "".join(text.split()) not in shown:
            raise BatchError(
                f"the chat template drops {name!r} of a turn of {message['role']!r}, or a part of it: {text!r}; it "
                f"shows {rendered[-200:]!r}. Take a template that shows it, or remove it from the data"
            )


def _one_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    while len(ids) > 1 and ids[0] == ids[1] == bos:
        ids = ids[1:]
    expected = tokenizer("")["input_ids"][:1] == [bos]
    return [bos, *ids] if expected and ids[:1] != [bos] else ids


def _without_eos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    eos = tokenizer.eos_token_id
    while len(ids) > 1 and eos is not None and ids[-1] == eos:
        ids = ids[:-1]
    return ids


def _end(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{tokenizer.name_or_path!r}: its tokenizer has no end-of-sequence token to train")
    return int(tokenizer.eos_token_id)
