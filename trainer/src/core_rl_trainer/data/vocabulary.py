"""The vocabulary of a model: token ids of data and of settings that it has embeddings for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from core_rl.errors import BatchError, ConfigError, raise_all
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.examples import Example
from core_rl_trainer.data.kinds import ExampleKind, Sample

__all__ = ["check_token_ids", "within_vocabulary"]


def within_vocabulary(kind: ExampleKind, size: int) -> ExampleKind:
    """``kind``, whose examples are a `BatchError` where they have a token that a model of ``size`` embeddings lacks."""

    def encode(chat_format: ChatFormat, example: Example) -> Sample:
        sample = kind.encode(chat_format, example)
        highest = max((token for ids, _ in kind.sequences(sample) for token in ids), default=0)
        if highest >= size:
            text = chat_format.tokenizer.convert_ids_to_tokens(highest)
            raise BatchError(
                f"has the token {text!r}, id {highest:,}, and the model has "
                f"embeddings for the ids below {size:,}; remove it from the data, or resize the model's embeddings"
            )
        return sample

    return replace(kind, encode=encode)


def check_token_ids(settings: Mapping[str, Iterable[int]], size: int) -> None:
    """Raise one `ConfigError` for all token ids of ``settings``, by field, beyond ``size`` embeddings."""
    problems = [
        f"{field} has the token id {token:,}; the ids of the model are 0 to {size - 1:,}"
        for field, ids in settings.items()
        for token in ids
        if not 0 <= token < size
    ]
    raise_all(ConfigError, "rollout", problems)
