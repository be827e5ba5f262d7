"""Token ids of prompts, completions and chats: one beginning-of-sequence token, and an end that is trained.

Each trained turn of a chat follows the prompt that the chat template renders for it. Turns share one sequence as long
as the template renders earlier turns unchanged; where it renders them otherwise (Qwen3 drops the reasoning of earlier
turns), the next turn begins a sequence of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from core_rl.errors import BatchError, ConfigError
from core_rl_trainer.data.chat_template import ChatFormat, ChatTemplate, Rendered
from core_rl_trainer.data.examples import answer_text
from core_rl_trainer.data.messages import (
    Message,
    in_any_place,
    is_blank,
    is_trained,
    message_text,
    missing_text,
    reasoning_of,
    squeezed,
)
from core_rl_trainer.data.pieces import continuation_ids, split_ids, text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Message]
Encoded = tuple[list[int], list[bool]]
"""Token ids of a sequence, and which of them are trained."""

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})

OPENED = re.compile(r"(<[^\s<>/|]+>|\[[A-Z_]+\])\s*\Z")
"""The tag with which a generation prompt opens reasoning, such as ``<think>``."""
EMPTY = r"(<([^\s<>/|]+)>)\s*</\2>\s*"
CLOSED = re.compile(EMPTY + r"\Z")
"""The empty reasoning with which a generation prompt ends where an argument of the template turns reasoning off."""
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
        chat = _Chat.of(chat_format.template(example), prompt)
        if prompt[-1]["role"] != "assistant":
            text = chat.prompt(len(prompt))
        else:  # its turn is continued itself
            before, completion = chat.turn(len(prompt) - 1)
            text = before + completion[: _end_of_text(message_text(prompt[-1]), completion)]
        return chat_format.opened(text_ids(chat_format.tokenizer, text))
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


# ----------------------------------------------------------------------- chats


def encode_chat(
    chat_format: ChatFormat,
    messages: Sequence[Message],
    example: Mapping[str, Any] = NO_FIELDS,
    *,
    first: int = 0,
    prefix: str = "",
) -> list[Encoded]:
    """Sequences in which the turns of the assistant from message ``first`` on are trained, but for marked ones.

    ``example`` has the tools, documents and template arguments. ``prefix`` begins the last turn and is not trained.
    Raises `BatchError` where a turn cannot be trained as it is written, or none is to be trained.
    """
    turns = [number for number in range(first, len(messages)) if is_trained(messages[number])]
    if not turns:
        raise BatchError("has no turn of the assistant to train: all are marked not to be trained")
    if (blank := next((number for number in turns if is_blank(messages[number])), None)) is not None:
        raise BatchError(
            f'has an empty turn of the assistant as message {blank + 1}; write its text, or mark it with "weight": 0'
        )
    chat = _Chat.of(chat_format.template(example), messages[: turns[-1] + 1])
    sequences: list[Encoded] = []
    for number in turns:
        before, completion = chat.turn(number)
        if prefix and number == len(messages) - 1:
            length = _end_of_text(prefix, completion)
            before, completion = before + completion[:length], completion[length:]
        start, turn = split_ids(chat_format.tokenizer, before, completion)
        start = chat_format.opened(start)
        turn, trained = _ended(chat_format, turn, message_text(messages[number]))
        ids, mask = sequences[-1] if sequences else ([], [])
        ids, mask = sequences.pop() if ids and start[: len(ids)] == ids else ([], [])
        mask = [*mask, *[False] * (len(start) - len(ids)), *[n < trained for n in range(len(turn))]]
        sequences.append(([*start, *turn], mask))
    # Each up to its last trained token.
    lengths = [len(mask) - mask[::-1].index(True) for _, mask in sequences]
    return [(ids[:size], mask[:size]) for (ids, mask), size in zip(sequences, lengths, strict=True)]


def ended_ids(chat_format: ChatFormat, messages: Sequence[Message], example: Mapping[str, Any]) -> list[int]:
    """Token ids of ``messages`` up to the end token of the last turn, which is the assistant's."""
    tokenizer = chat_format.tokenizer
    before, completion = _Chat.of(chat_format.template(example), messages).turn(len(messages) - 1)
    turn = continuation_ids(tokenizer, before, completion)
    end = _end_in(chat_format, turn, message_text(messages[-1]))
    ids = chat_format.opened(text_ids(tokenizer, before + completion))
    return ids[: len(ids) + end - len(turn)] if end else [*ids, end_of(tokenizer)]


# ------------------------------------------------------------------------ text


@dataclass(frozen=True, kw_only=True)
class _Chat:
    """Messages in the form that their template takes."""

    template: ChatTemplate
    messages: Rendered

    @staticmethod
    def of(template: ChatTemplate, messages: Sequence[Message]) -> _Chat:
        prompt = messages[-1]["role"] != "assistant"
        return _Chat(template=template, messages=template.formed(messages, to_be_continued=prompt))

    def turn(self, number: int) -> tuple[str, str]:
        """The prompt of an assistant's turn, and the text with which the model has to continue it."""
        message = self.messages[number]
        rendered = self.template.render(self.messages[: number + 1], to_be_continued=False)
        prompt = self.prompt(number) if number else self._first_header(rendered)
        opened = OPENED.search(prompt)
        tag = opened[1] if opened else ""
        if rendered.startswith(prompt):
            completion = rendered[len(prompt) :]
            if missing_text(message, tag + completion) and "</think>" in self.template.text:
                completion = _reasoned(message, "", completion)
        else:
            completion = self._rewritten(number, prompt, rendered)
        if missing := missing_text(message, tag + completion):
            raise BatchError(
                f"the chat template drops {missing} of message {number + 1} and shows {completion!r}; write it where "
                "the template reads it, or take a template that shows it"
            )
        return prompt, completion

    def prompt(self, count: int) -> str:
        """The first ``count`` messages with a generation prompt. Raises `BatchError` where it drops a text."""
        prompt = self.template.render(self.messages[:count], to_be_continued=True)
        rest = squeezed(prompt)
        for number, message in enumerate(self.messages[:count]):
            if missing := missing_text(in_any_place(message), rest):
                raise BatchError(
                    f"the chat template drops {missing} of message {number + 1} ({message['role']}); remove it, or "
                    "take a template that shows it"
                )
            text = squeezed(message_text(message))
            if message["role"] not in ("system", "assistant") and text in rest:
                rest = rest[rest.index(text) + len(text) :]
        return prompt

    def _first_header(self, rendered: str) -> str:
        """The text before that of a first turn, which has no prompt."""
        header = self._generation_prompt(1, self.template.render(self.messages[:1], to_be_continued=True))
        header = OPENED.sub("", header)
        if header and header in rendered:
            return rendered[: rendered.index(header) + len(header)]
        raise BatchError(
            'begins with a turn of the assistant, which answers nothing; mark it with "weight": 0 or begin with a turn '
            "of the user"
        )

    def _generation_prompt(self, count: int, prompt: str) -> str:
        """The text that a template adds after ``count`` messages to have them continued; empty where it is unclear."""
        before = self.template.render(self.messages[:count], to_be_continued=False)
        return prompt[len(before) :] if prompt.startswith(before) else ""

    def _rewritten(self, number: int, prompt: str, rendered: str) -> str:
        """The turn where ``rendered`` does not begin with ``prompt``: reasoning opened there, or another past."""
        message = self.messages[number]
        closed, opened = CLOSED.search(prompt), OPENED.search(prompt)
        if closed and (rest := self._rest(number, prompt[: closed.start()], rendered)) is not None:
            if not reasoning_of(message) and closed[1] not in message_text(message):
                return re.sub(rf"\A\s*{EMPTY}", "", rest)
            raise BatchError(
                f"has reasoning in message {number + 1}, and the generation prompt closes it at once; remove the "
                "reasoning, or turn it on with data.template_args"
            )
        if opened and (rest := self._rest(number, prompt[: opened.start()], rendered)) is not None:
            return _reasoned(message, opened[1], rest)
        if (rest := self._rest(number, prompt, rendered)) is not None:
            return rest
        raise BatchError(
            f"the chat template rewrites what comes before message {number + 1}: the prompt ends with "
            f"{prompt[-80:]!r}, and the chat with {rendered[-80:]!r}; fix the template, or set data.template_args so "
            "that both agree"
        )

    def _rest(self, number: int, head: str, rendered: str) -> str | None:
        """The part of ``rendered`` behind ``head``, or behind the generation prompt at its end; None without either."""
        if rendered.startswith(head):
            return rendered[len(head) :]
        header = self._generation_prompt(number, head)
        places = [match.end() for match in re.finditer(re.escape(header), rendered)] if header else []
        rests = [rendered[place:] for place in reversed(places)]
        complete = (rest for rest in rests if not missing_text(self.messages[number], rest))
        return next(complete, rests[0] if rests else None)


def _reasoned(message: Message, tag: str, rest: str) -> str:
    """``rest`` of a rendered turn behind the reasoning that the template leaves out.

    ``tag`` is empty, or was opened by the generation prompt; a turn without reasoning closes it at once.
    """
    close = f"{tag[:1]}/{tag[1:]}" if tag else "</think>"
    if tag and close in rest:
        return rest.removeprefix(tag).lstrip("\n")
    head, mark, tail = message_text(message).rpartition(close)
    if mark:
        head = head.lstrip().removeprefix(tag).lstrip("\n") if tag else head
        return head + mark + tail[: len(tail) - len(tail.lstrip())] + rest.lstrip()
    if not tag:
        return rest
    reasoning = reasoning_of(message).strip()
    return f"{reasoning}\n{close}\n\n{rest.lstrip()}"


def _end_of_text(text: str, completion: str) -> int:
    """The position behind ``text`` in a completion. Raises `BatchError` where it is rendered otherwise."""
    for form in (text, text.strip()):
        if (start := completion.find(form)) >= 0:
            return start + len(form)
    raise BatchError(f"ends with a turn of the assistant that the template does not continue: {text!r}")


# ---------------------------------------------------------------------- tokens


def _ended(chat_format: ChatFormat, turn: list[int], text: str) -> tuple[list[int], int]:
    """A turn with a token that ends it, the end-of-sequence token where it has none; the number of trained tokens."""
    end = _end_in(chat_format, turn, text)
    if not end:
        return [*turn, end_of(chat_format.tokenizer)], len(turn) + 1
    while turn[end - 1] in turn[: end - 1]:  # the text may spell the end out as well, with blanks behind it
        earlier = end - 1 - turn[end - 2 :: -1].index(turn[end - 1])
        if squeezed(str(chat_format.tokenizer.decode(turn[earlier : end - 1]))):
            break
        end = earlier
    return turn, end


def _end_in(chat_format: ChatFormat, turn: list[int], text: str) -> int:
    """The number of tokens up to the last closing token behind ``text``; 0 without one."""
    last = max((number + 1 for number, token in enumerate(turn) if token in chat_format.closing), default=0)
    rest = squeezed(str(chat_format.tokenizer.decode(turn[last:])))
    return 0 if rest and squeezed(text).endswith(rest) else last


def end_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's end-of-sequence token. Raises `ConfigError` where it has none."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{tokenizer.name_or_path!r}: its tokenizer has no end-of-sequence token to train")
    return int(tokenizer.eos_token_id)
