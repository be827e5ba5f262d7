"""The vocabulary of a model: token ids of data that it has embeddings for, and the texts that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from core_rl.errors import BatchError, ConfigError, raise_all
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.examples import Example
from core_rl_trainer.data.kinds import ExampleKind, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["check_same_tokens", "within_vocabulary"]


def within_vocabulary(kind: ExampleKind, size: int) -> ExampleKind:
    """``kind``, whose examples are a `BatchError` where they have a token that a model of ``size`` embeddings lacks."""

    def encode(chat_format: ChatFormat, example: Example) -> Sample:
        sample = kind.encode(chat_format, example)
        highest = max((token for ids, _ in kind.sequences(sample) for token in ids), default=0)
        if highest >= size:
            text = chat_format.tokenizer.convert_ids_to_tokens(highest)
            raise BatchError(
                f"has the token {text!r}, id {highest:,}, and a model of the run has embeddings for the ids below "
                f"{size:,} alone; remove it from the data, or resize the embeddings"
            )
        return sample

    return replace(kind, encode=encode)


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, paths: Mapping[str, str | None]) -> None:
    """Raise one `ConfigError` for models, by field, that read the ids of ``tokenizer`` as other tokens.

    A directory without a tokenizer is not checked.
    """
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
