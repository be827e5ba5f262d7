"""Token ids of prompts, completions and chats: one beginning-of-sequence token, and an end that is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from core_rl.errors import BatchError
from core_rl_trainer.data.chat import NO_FIELDS, Encoded, encode_chat, end_of, prompt_ids
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.examples import answer_text
from core_rl_trainer.data.messages import Message, message_text
from core_rl_trainer.data.pieces import split_ids, text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Message]
CHAT_FIELDS = ("tools", "documents", "chat_template_kwargs")
"""Fields of an example that a chat template renders."""


def encode_prompt(
    chat_format: ChatFormat, prompt: str | Messages, example: Mapping[str, Any] = NO_FIELDS
) -> list[int]:
    """Token ids of ``prompt``, ready to be continued; messages go through the chat template.

    ``example`` has the tools, documents and template arguments of a chat. There is one beginning-of-sequence token
    where the tokenizer puts it, even if the text spells it out as well. No end-of-sequence token is at the end. A last
    turn of the assistant is continued. Raises what `ChatFormat.template` raises.
    """
    if not isinstance(prompt, str):
        return prompt_ids(chat_format, prompt, example)
    _refuse_chat_fields(example)
    return chat_format.opened(text_ids(chat_format.tokenizer, _without_eos(chat_format.tokenizer, prompt)))


def encode_completion(
    chat_format: ChatFormat,
    prompt: str | Messages,
    completion: str | Messages,
    example: Mapping[str, Any] = NO_FIELDS,
) -> list[Encoded]:
    """``prompt`` and ``completion``; the completion and an end token are trained.

    After a chat, the completion is the assistant's next turn, or several turns, of which the assistant's are trained;
    a text continues a last turn of the assistant. See `encode_chat` for several sequences.
    """
    if isinstance(prompt, str):
        assert isinstance(completion, str)  # turns come after a chat
        _refuse_chat_fields(example)
        return [_continued(chat_format, _without_eos(chat_format.tokenizer, prompt), completion)]
    if not isinstance(completion, str):
        return encode_chat(chat_format, [*prompt, *completion], example, first=len(prompt))
    *before, last = prompt
    if last["role"] != "assistant":
        turn = {"role": "assistant", "content": completion}
        return encode_chat(chat_format, [*prompt, turn], example, first=len(prompt))
    prefix = message_text(last)
    turn = {**last, "content": prefix + completion}
    return encode_chat(chat_format, [*before, turn], example, first=len(before), prefix=prefix)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoded:
    """A whole text; all of it and an end-of-sequence token are trained, but for the beginning-of-sequence token."""
    bos = str(tokenizer.bos_token or "")
    start = bos if text.startswith(bos) else ""
    return _continued(ChatFormat(tokenizer=tokenizer), start, text.removeprefix(start))


def demonstration_sequences(chat_format: ChatFormat, example: Mapping[str, Any]) -> list[Encoded]:
    """An example with ``messages``, with ``prompt`` and ``answer``, or with a ``text`` alone."""
    if example.get("messages") is not None:
        return encode_chat(chat_format, example["messages"], example)
    if example.get("prompt") is None:
        _refuse_chat_fields(example)
        return [encode_text(chat_format.tokenizer, example["text"])]
    answer = example["answer"]
    completion = answer if isinstance(answer, list) else answer_text(answer)
    return encode_completion(chat_format, example["prompt"], completion, example)


def encode_demonstration(tokenizer: PreTrainedTokenizerBase, example: Mapping[str, Any]) -> Encoded:
    """The only sequence of an example under the tokenizer's chat template, for use outside of a run.

    Raises `BatchError` where the template needs several, which `demonstration_sequences` gives.
    """
    sequences = demonstration_sequences(ChatFormat(tokenizer=tokenizer), example)
    if len(sequences) > 1:
        raise BatchError(f"has {len(sequences)} sequences: the chat template renders earlier turns otherwise")
    return sequences[0]


def _continued(chat_format: ChatFormat, before: str, text: str) -> Encoded:
    """``before``, and ``text`` with an end-of-sequence token, which are trained."""
    start, trained = split_ids(chat_format.tokenizer, before, text)
    start, end = chat_format.opened(start), end_of(chat_format.tokenizer)
    while trained[-1:] == [end]:
        trained = trained[:-1]
    return [*start, *trained, end], [False] * len(start) + [True] * (len(trained) + 1)


def _refuse_chat_fields(example: Mapping[str, Any]) -> None:
    """Raise `BatchError` for fields of a text that only a chat template would show."""
    for name in CHAT_FIELDS:
        if example.get(name):
            raise BatchError(
                f"has {name!r} and a text; they need chat messages, which the chat template renders"
            )


def _without_eos(tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """``prompt`` without end-of-sequence tokens at its end, which would leave nothing to continue."""
    eos = str(tokenizer.eos_token or "")
    while eos and prompt != eos and prompt.endswith(eos):
        prompt = prompt.removesuffix(eos)
    return prompt
