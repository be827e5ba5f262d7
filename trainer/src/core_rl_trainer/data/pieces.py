"""Pieces of a text as token ids of the joined text, split where a piece begins.

A piece that is encoded alone may be another text: tokenizers write a blank before it (Llama 2), drop white space at its
ends, or merge it with its neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from core_rl.errors import BatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTEXTS = ("a", "0", ".", "\n")
"""Texts of several kinds: a text merges with few of them."""
SHOWN = 20
"""Characters on each side of a boundary that are shown."""


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of ``text`` alone, without special tokens around it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of ``ids`` with special tokens, and with spaces as they are."""
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that the tokenizer writes before any text."""
    around, ids = (list(tokenizer(text)["input_ids"]) for text in ("", "a"))
    ids = ids[: shared_length(around, ids)]
    return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] != [tokenizer.bos_token_id] else ids


def split_ids(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> tuple[list[int], list[int]]:
    """Token ids of ``before + text``, split where ``text`` begins; `BatchError` for a token that reaches over both."""
    start, ids = text_ids(tokenizer, before), text_ids(tokenizer, before + text)
    extended = ids[: len(start)] == start
    if extended and (tokenizer.unk_token_id is None or start[-1:] != [tokenizer.unk_token_id]):
        return start, ids[len(start) :]
    if not tokenizer.is_fast:  # it tells no positions
        first = shared_length(start, ids)
        token = tokenizer.convert_ids_to_tokens(ids[first - extended])
        raise _reaching(before, text, str(token), "split the text elsewhere")
    at, begin, end = _token_over(tokenizer, before + text, len(before))
    if begin == len(before) or (extended and at == len(start)):
        return ids[:at], ids[at:]
    head, tail = before[begin:], text[: end - len(before)]
    advice = f"move {_short(head)} from the prompt, or the template's generation prompt, to the beginning of the answer"
    advice += f", or remove {_short(tail)} from there" if tail.isspace() else ""
    raise _reaching(before, text, head + tail, advice)


def continuation_ids(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[int]:
    """Token ids with which ``text`` continues ``before``, whose tokens stay as they are.

    For the replies of environments: after the model's tokens and these ids, the decoded text is that of the completion
    and ``text``. They are ids of the joined text unless a token would reach over both, or blanks would be added.
    """
    contexts = [before, *CONTEXTS] if before.strip() else CONTEXTS
    start, first = text_ids(tokenizer, contexts[0]), None
    for context in contexts:
        try:
            _, ids = split_ids(tokenizer, context, text)
        except BatchError:
            continue
        first = ids if first is None else first
        if decoded(tokenizer, start + ids) == decoded(tokenizer, start) + text:
            return ids
    return (
        text_ids(tokenizer, text) if first is None else first
    )  # the tokenizer does not keep texts as they are


def shared_length(left: Sequence[object], right: Sequence[object]) -> int:
    """The length of the longest common beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(left), len(right)))


def _token_over(tokenizer: PreTrainedTokenizerBase, text: str, boundary: int) -> tuple[int, int, int]:
    """Number, begin and end of the first token that does not end before ``boundary``.

    Some tokenizers leave blanks out of the positions of their tokens, which begin with them all the same, and others
    the accents that they join to the letter before (NFC). Tokens of single bytes share a character, and then the begin
    is that of all of them.
    """
    encoded, reached = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True), 0
    spans = [
        (begin, end if text[end:after].isspace() else max(end, after))
        for (begin, end), (after, _) in pairwise([*encoded["offset_mapping"], (len(text), 0)])
    ]
    for number, (begin, end) in enumerate(spans):
        if begin < boundary >= end:
            reached = max(reached, end)
            continue
        shown = decoded(tokenizer, [encoded["input_ids"][number]])
        blanks = min(len(shown) - len(shown.lstrip()), max(begin - reached, 0))
        if begin == end == boundary and blanks:  # nothing but blanks
            reached += blanks
            continue
        first = min(begin - blanks, boundary)
        for earlier in reversed(spans[:number] if first < boundary else []):
            first = min(first, earlier[0]) if earlier[1] > first else first
        return number, first, end
    return len(spans), boundary, boundary


def _reaching(before: str, text: str, token: str, advice: str) -> BatchError:
    return BatchError(
        f"has the token {_short(token)}, which reaches from the prompt (…{before[-SHOWN:]!r}) into the answer "
        f"({text[:SHOWN]!r}…); {advice}"
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]}…{text[-SHOWN:]}")
