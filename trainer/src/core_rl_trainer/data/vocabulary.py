"""The vocabulary of a model: token ids of data that it has embeddings for."""

from __future__ import annotations

from dataclasses import replace

from core_rl.errors import BatchError
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.examples import Example
from core_rl_trainer.data.kinds import ExampleKind, Sample

__all__ = ["within_vocabulary"]


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
