"""The tokenizer of a model directory: its end tokens, limits of its model, and token ids as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from core_rl.config.engine import ModelConfig
from core_rl.errors import ConfigError, raise_all
from core_rl_trainer.data.pieces import decoded, leading_ids, shared_length, text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "chat_template.jinja",
)
"""Files that name end tokens."""
SHOWN = 1000
"""Characters at the beginning and at the end of a text that are shown."""
SHOWN_IDS = 8
"""Ids of a part that are shown."""


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory; `ConfigError` if there is none.

    Where its end token is missing or beyond the embeddings, it gets the first end token of the model's configs.
    """
    from core_rl.checkpoint.end_tokens import read_tokenizer

    vocabulary_size(path)  # whose config.json is at fault has no tokenizer either
    try:
        tokenizer = read_tokenizer(path)
    except ConfigError as error:
        raise ConfigError(f"model.path = {path!r}: {error}") from error
    ends = sorted(all_end_tokens(tokenizer))
    texts = [text for end in ends if (text := tokenizer.convert_ids_to_tokens(end))]
    if tokenizer.eos_token_id not in ends and texts:
        tokenizer.eos_token = str(texts[0])
    return tokenizer


def vocabulary_size(path: str) -> int:
    """The number of embeddings of the text model in ``path``."""
    from core_rl.checkpoint.model_config import read_config

    return int(read_config(ModelConfig(path=path)).get_text_config().vocab_size)


def context_length(path: str) -> int | None:
    """The most tokens of a sequence of the text model in ``path``; None where its config has no limit."""
    from core_rl.backend.inference_backend import ModelLimits
    from core_rl.checkpoint.model_config import read_config

    return ModelLimits.of(read_config(ModelConfig(path=path))).context_length


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, paths: Mapping[str, str | None]) -> None:
    """Raise one `ConfigError` for models, by field, with a tokenizer that reads the ids of ``tokenizer`` otherwise."""
    problems = [
        problem
        for field, path in paths.items()
        if path is not None and (problem := _other_tokens(tokenizer, field, path)) is not None
    ]
    raise_all(ConfigError, "recipe", problems)


def _other_tokens(tokenizer: PreTrainedTokenizerBase, field: str, path: str) -> str | None:
    from core_rl.checkpoint.end_tokens import read_tokenizer

    try:
        texts = {token: text for text, token in read_tokenizer(path).get_vocab().items()}
    except ConfigError:
        return None
    differing = sorted(
        (token, text) for text, token in tokenizer.get_vocab().items() if texts.get(token, text) != text
    )
    if not differing:
        return None
    token, text = differing[0]
    return (
        f"{field} = {path!r}: its tokenizer is not that of model.path (id {token:,} is {texts[token]!r}, not {text!r}; "
        f"ids that differ: {len(differing):,}); take a model with the same tokenizer"
    )


# ------------------------------------------------------------------ end tokens


def all_end_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokens that end a sequence: of ``tokenizer``, and of the configs of the model it was loaded with."""
    end, path = tokenizer.eos_token_id, tokenizer.name_or_path
    if path and Path(path, FILES[0]).is_file():
        files = (file for name in FILES if (file := Path(path, name)).is_file())
        return _model_ends(path, tuple(file.stat().st_mtime_ns for file in files))
    return frozenset() if end is None else frozenset({int(end)})


@lru_cache(maxsize=8)
def _model_ends(path: str, _modified: tuple[int, ...]) -> frozenset[int]:
    from core_rl.checkpoint.end_tokens import end_tokens
    from core_rl.checkpoint.model_config import read_config

    return frozenset(end_tokens(read_config(ModelConfig(path=path)), path))


def require_end_tokens(
    tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int] = (), stop: Sequence[str] = ()
) -> dict[int, str]:
    """Texts of the end tokens and ``stop_token_ids``, by id; `ConfigError` without any, and without a text ``stop``."""
    ends = sorted({*all_end_tokens(tokenizer), *stop_token_ids})
    if not ends and not stop:
        raise ConfigError(
            f"model.path = {tokenizer.name_or_path!r}: there is no end token with an embedding, so that no sequence "
            "would end: set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json, to the "
            "token that ends a turn"
        )
    return {token: str(tokenizer.convert_ids_to_tokens(token) or "") for token in ends}


def describe_end_tokens(ends: Mapping[int, str]) -> str:
    """Texts and ids of end tokens, for a message."""
    return ", ".join(f"{text} ({token})" for token, text in ends.items())


# --------------------------------------------------------------- token ids as text


def marked_text(tokenizer: PreTrainedTokenizerBase, sequence: tuple[Sequence[int], Sequence[bool]]) -> str:
    """The decoded sequence with trained tokens in ⟦ ⟧; the middle of a long one is left out.

    A part whose text would be encoded as other tokens has the first of its ids in ⟨ ⟩.
    """
    ids, mask = sequence
    begin, end = _ambiguous(tokenizer, ids)
    text, number = "", 0
    for trained, part in decoded_runs(tokenizer, ids, mask):
        last = next((n for n in range(number, len(mask)) if mask[n] != trained), len(mask))
        shown = ids[max(begin, number) : min(end, last)]
        number = last
        text += f"⟦{part}⟧" if trained else part
        if shown:
            text += f"⟨ids {', '.join(map(str, shown[:SHOWN_IDS]))}{', …' * (len(shown) > SHOWN_IDS)}⟩"
    if len(text) <= 2 * SHOWN:
        return text
    return f"{text[:SHOWN]} … {len(text) - 2 * SHOWN:,} characters … {text[-SHOWN:]}"


def _ambiguous(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[int, int]:
    """Begin and end of the tokens that differ from tokens of the decoded text; equal where none does."""
    leading = leading_ids(tokenizer)
    first = len(leading) if list(ids[: len(leading)]) == leading else 0
    body = list(ids[first:])
    again = text_ids(tokenizer, decoded(tokenizer, body))
    if again == body:
        return 0, 0
    begin = shared_length(body, again)
    same = shared_length(body[begin:][::-1], again[begin:][::-1])
    return first + begin, first + max(len(body) - same, begin + 1)


def decoded_runs(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], mask: Sequence[bool]
) -> list[tuple[bool, str]]:
    """The parts of the decoded sequence whose tokens have the same value of ``mask``, with spaces as they are.

    Repeated special tokens, such as placeholders of images, are shown once with their number.
    """
    text, begin, number, runs = decoded(tokenizer, ids), 0, 0, []
    special = [re.escape(str(added)) for added in tokenizer.added_tokens_decoder.values() if added.special]
    repeated = re.compile(rf"({'|'.join(special)})\1+") if special else None
    for trained, run in groupby(mask):
        number += sum(1 for _ in run)
        end = max(begin, shared_length(text, decoded(tokenizer, ids[:number])))
        part = text[begin:end]
        if repeated:
            part = repeated.sub(lambda match: f"{match[1]} ×{len(match[0]) // len(match[1])}", part)  # noqa: RUF001
        runs.append((trained, part))
        begin = end
    return runs
