"""Pieces of text next to the joined text, over the tokenizers of `tokenizer_table`."""

from __future__ import annotations

import re
from ast import literal_eval
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizer_table import TOKENIZERS

from core_rl.errors import BatchError
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.encoding import (
    encode_chat,
    encode_completion,
    encode_prompt,
    encode_text,
    ended_ids,
)
from core_rl_trainer.data.pieces import continuation_ids, leading_ids, split_ids, text_ids
from core_rl_trainer.data.tokenizers import decoded_runs, marked_text

WORDS = [*"ab 52.\n\t+=éA日ﬁ😀\u0301", "e\u0301", "hello", "  ", "\n\n", "Answer:", " yes", "=5", "123"]
TEXTS = st.lists(st.sampled_from([*WORDS, "<|user|>", "<|end|>", "</s>"]), min_size=1, max_size=6).map(
    "".join
)
PLAIN = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map("".join)
CASES = pytest.mark.parametrize("name", TOKENIZERS)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}\n"
    "{% else %}bot:{{ m.content }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)


def joined(tokenizer: Any, text: str) -> list[int]:
    """``text`` with the leading special tokens, without an end."""
    ids = [*leading_ids(tokenizer), *text_ids(tokenizer, text)]
    while ids[-1:] == [tokenizer.eos_token_id]:
        ids = ids[:-1]
    return ids


def trained_text(tokenizer: Any, ids: list[int], mask: list[bool]) -> str:
    return "".join(text for trained, text in decoded_runs(tokenizer, ids, mask) if trained)


@CASES
@settings(max_examples=12, derandomize=True)
@given(prompt=TEXTS.map(lambda text: text.replace("</s>", "") + "."), answer=TEXTS)
def test_completions_continue_their_prompt(name: str, prompt: str, answer: str) -> None:
    tokenizer, lossless = TOKENIZERS[name]
    chat_format = ChatFormat(tokenizer=tokenizer)
    try:
        ((ids, mask),) = encode_completion(chat_format, prompt, answer)
    except BatchError as error:
        (head,) = re.findall(r"; move (.*?) from the prompt", str(error))
        head = literal_eval(head)
        assert head
        assert prompt.endswith(head)
        prompt, answer = prompt.removesuffix(head), head + answer
        ((ids, mask),) = encode_completion(chat_format, prompt, answer)
    end = [tokenizer.eos_token_id]
    assert ids == joined(tokenizer, prompt + answer.removesuffix("</s>")) + end or "</s>" in answer
    assert mask[-1]
    if lossless and "</s>" not in answer and "<" not in prompt + answer and prompt.lstrip() == prompt != "":
        assert trained_text(tokenizer, ids, mask) == answer + "</s>"


@CASES
@settings(max_examples=12, derandomize=True)
@given(before=PLAIN, text=PLAIN)
@example(before="hello", text="\u0301 yes")
@example(before="A", text="\u0301")
def test_pieces_keep_their_letters(name: str, before: str, text: str) -> None:
    tokenizer = TOKENIZERS[name].tokenizer
    try:
        start, _ = split_ids(tokenizer, before, text)
    except BatchError:
        return
    alone = text_ids(tokenizer, before)
    known = tokenizer.unk_token_id not in [*start, *alone]
    assert not known or str(tokenizer.decode(start)).strip() == str(tokenizer.decode(alone)).strip()


@CASES
@settings(max_examples=12, derandomize=True)
@given(before=PLAIN, text=PLAIN)
def test_only_tokens_over_both_pieces_are_refused(name: str, before: str, text: str) -> None:
    tokenizer, lossless = TOKENIZERS[name]
    ids = text_ids(tokenizer, before + text)
    starts = [ids[:length] for length in range(len(ids) + 1)]
    splits = [start for start in starts if str(tokenizer.decode(start)) == before]
    if lossless and splits and before == before.lstrip():
        assert split_ids(tokenizer, before, text)[0] in splits
    if text_ids(tokenizer, before) in starts and tokenizer.unk_token_id not in ids:
        assert split_ids(tokenizer, before, text)[0] == text_ids(tokenizer, before)


@CASES
@settings(max_examples=12, derandomize=True)
@given(before=PLAIN, text=PLAIN, ended=st.booleans())
def test_replies_are_read_as_they_are_meant(name: str, before: str, text: str, ended: bool) -> None:
    tokenizer, lossless = TOKENIZERS[name]
    drawn = text_ids(tokenizer, before) + [tokenizer.eos_token_id] * ended
    reply = continuation_ids(tokenizer, str(tokenizer.decode(drawn)), text)
    if lossless and before == before.lstrip():
        assert tokenizer.decode(drawn + reply) == str(tokenizer.decode(drawn)) + text
    assert not set(reply) & set(leading_ids(tokenizer))


@CASES
@settings(max_examples=8, derandomize=True)
@given(text=TEXTS, marks=st.lists(st.booleans(), min_size=40, max_size=40))
def test_runs_are_parts_of_the_whole(name: str, text: str, marks: list[bool]) -> None:
    tokenizer = TOKENIZERS[name].tokenizer
    ids = text_ids(tokenizer, text)
    special = {number for number, added in tokenizer.added_tokens_decoder.items() if added.special}
    assume(not any(left == right and left in special for left, right in pairwise(ids)))  # shown with a number
    runs = decoded_runs(tokenizer, ids, (marks * len(ids))[: len(ids)])
    assert "".join(part for _, part in runs) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@CASES
@settings(max_examples=8, derandomize=True)
@given(text=TEXTS)
def test_whole_texts_are_trained(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name].tokenizer
    ids, mask = encode_text(tokenizer, text)
    leading = leading_ids(tokenizer)
    assert ids[:-1] == joined(tokenizer, text) or "</s>" in text
    assert mask == [False] * len(leading) + [True] * (len(ids) - len(leading))


@CASES
@settings(max_examples=8, derandomize=True)
@given(turns=st.lists(PLAIN, min_size=2, max_size=4).filter(lambda turns: len(turns) % 2 == 0))
def test_turns_are_those_of_the_joined_chat(name: str, turns: list[str]) -> None:
    tokenizer, lossless = TOKENIZERS[name]
    tokenizer.chat_template = TEMPLATE
    chat = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    chat_format = ChatFormat(tokenizer=tokenizer, ends=frozenset({tokenizer.eos_token_id}))
    ended = ended_ids(chat_format, chat, {})
    assert encode_prompt(chat_format, [*chat, chat[0]])[: len(ended)] == ended
    text = str(tokenizer.apply_chat_template(chat, tokenize=False))
    try:
        for number in range(1, len(chat), 2):
            before = tokenizer.apply_chat_template(chat[:number], tokenize=False, add_generation_prompt=True)
            split_ids(tokenizer, str(before), chat[number]["content"] + "</s>")
    except BatchError as error:
        with pytest.raises(BatchError, match=re.escape(str(error).split(" (")[0])):
            encode_chat(chat_format, chat)
        return
    ids, mask = encode_chat(chat_format, chat)[-1]
    assert ids == [*joined(tokenizer, text), tokenizer.eos_token_id]
    if lossless:
        assert trained_text(tokenizer, ids, mask).endswith(turns[-1] + "</s>")
    assert encode_prompt(chat_format, chat[:-1])


@CASES
@settings(max_examples=8, derandomize=True)
@given(pieces=st.tuples(PLAIN, PLAIN))
def test_ambiguous_text_is_shown_with_ids(name: str, pieces: tuple[str, str]) -> None:
    tokenizer = TOKENIZERS[name].tokenizer
    before, after = (text_ids(tokenizer, text) for text in pieces)
    again = text_ids(tokenizer, str(tokenizer.decode(before + after)))
    shown = marked_text(tokenizer, (before + after, [False] * len(before) + [True] * len(after)))
    assert ("⟨ids " in shown) == (again != before + after)
