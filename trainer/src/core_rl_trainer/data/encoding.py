"""Token ids of prompts, completions and chats: one beginning-of-sequence token, and an end that is trained."""

from __future__ import annotations

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
]

Messages = Sequence[Mapping[str, Any]]
Encoded = tuple[list[int], list[bool]]
"""Token ids of a sequence, and which of them are trained."""


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages) -> list[int]:
    """Token ids of ``prompt``, ready to be continued; messages go through the tokenizer's chat template.

    There is one beginning-of-sequence token where the tokenizer puts it, even if the text spells it out as well.
    There is no end-of-sequence token at the end. Raises `ConfigError` for messages where the tokenizer has no chat
    template.
    """
    if not isinstance(prompt, str):
        return _chat_ids(tokenizer, prompt, to_be_continued=True)
    return _without_eos(tokenizer, _one_bos(tokenizer, tokenizer(prompt)["input_ids"]))


def encode_completion(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, completion: str | Messages
) -> Encoded:
    """``prompt`` and ``completion`` as one sequence; the completion and an end-of-sequence token are trained.

    After a chat, the completion is the assistant's next turn, or several turns, of which the assistant's are trained.
    """
    if not isinstance(prompt, str):
        turns = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        return encode_chat(tokenizer, [*prompt, *turns], first=len(prompt))
    assert isinstance(completion, str)  # turns come after a chat
    start = encode_prompt(tokenizer, prompt)
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


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages, first: int = 0) -> Encoded:
    """A whole conversation; the turns of the assistant from message ``first`` on are trained.

    What the template writes after the last end-of-sequence token of the last turn (a line feed) is cut off. Raises
    `BatchError` where the template rewrites earlier turns when later ones come, so that a turn's tokens are
    not those that the model would be shown.
    """
    turns = [n for n in range(first, len(messages)) if messages[n]["role"] == "assistant"]
    ids = _chat_ids(tokenizer, messages[: turns[-1] + 1], to_be_continued=False)
    mask = [False] * len(ids)
    for number in turns:
        before = _chat_ids(tokenizer, messages[:number], to_be_continued=True) if number else []
        after = _chat_ids(tokenizer, messages[: number + 1], to_be_continued=False)
        if after[: len(before)] != before or ids[: len(after)] != after:
            raise BatchError(
                f"the chat template rewrites what comes before message {number}; train on the last turn "
                "alone ('prompt' and 'answer'), or fix the template"
            )
        mask[len(before) : len(after)] = [True] * (len(after) - len(before))
    return _ended(tokenizer, ids, mask)


def encode_demonstration(tokenizer: PreTrainedTokenizerBase, example: Mapping[str, Any]) -> Encoded:
    """An example with ``messages``, with ``prompt`` and ``answer``, or with a ``text`` alone."""
    if example.get("messages") is not None:
        return encode_chat(tokenizer, example["messages"])
    if example.get("prompt") is None:
        return encode_text(tokenizer, example["text"])
    answer = example["answer"]
    return encode_completion(
        tokenizer, example["prompt"], answer if isinstance(answer, list) else answer_text(answer)
    )


def _ended(tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[bool]) -> Encoded:
    """With a trained end-of-sequence token as the last one."""
    end = _end(tokenizer)
    start = max((n + 1 for n, trained in enumerate(mask) if not trained), default=0)
    places = [n for n in range(start, len(ids)) if ids[n] == end]
    if places:
        return ids[: places[-1] + 1], mask[: places[-1] + 1]
    return [*ids, end], [*mask, True]


def _chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, to_be_continued: bool) -> list[int]:
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{tokenizer.name_or_path!r}: its tokenizer has no chat template, and the data has chat messages; add a "
            "chat_template.jinja to the model's directory, or write each prompt as a text"
        )
    try:
        ids: Any = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=to_be_continued,
            tokenize=True,
            return_dict=False,
        )
    except TemplateError as error:
        raise BatchError(f"the chat template refuses these messages: {error}") from error
    return _one_bos(tokenizer, list(ids))


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
