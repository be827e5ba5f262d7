"""The vocabulary of a model: token ids of data and of settings that it has embeddings for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from core_rl.errors import BatchError, ConfigError, raise_all
from core_rl_trainer.data.examples import Example
from core_rl_trainer.data.kinds import ExampleKind, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["check_token_ids", "within_vocabulary"]


def within_vocabulary(kind: ExampleKind, size: int) -> ExampleKind:
    """``kind``, whose examples are a `BatchError` where they have a token that a model of ``size`` embeddings lacks."""

    def encode(tokenizer: PreTrainedTokenizerBase, example: Example) -> Sample:
        sample = kind.encode(tokenizer, example)
        highest = max(_token_ids(kind, sample), default=0)
        if highest >= size:
            raise BatchError(
                f"has the token {tokenizer.convert_ids_to_tokens(highest)!r}, id {highest:,}, and the model has "
                f"embeddings for the ids below {size:,}; remove it from the data, or resize the model's embeddings"
            )
        return sample

    return replace(kind, encode=encode)


def _token_ids(kind: ExampleKind, sample: Sample) -> Iterable[int]:
    if kind.name == "prompts":
        return list(sample["prompt_ids"])
    if kind.name == "demonstrations":
        return list(sample["input_ids"])
    return [token for name in ("chosen", "rejected") for token in sample[name][0]]


def check_token_ids(settings: Mapping[str, Iterable[int]], size: int) -> None:
    """Raise one `ConfigError` for all token ids of ``settings``, by field, beyond ``size`` embeddings."""
    problems = [
        f"{field} has the token id {token:,}; the ids of the model are 0 to {size - 1:,}"
        for field, ids in settings.items()
        for token in ids
        if not 0 <= token < size
    ]
    raise_all(ConfigError, "rollout", problems)
