"""The kinds of training data: prompts, sequences to imitate, and pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any, Literal

from core_rl.data.media import NO_MEDIA, Media, count_patches
from core_rl.errors import BatchError
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.encoding import Encoded, demonstration_sequences, encode_completion, encode_prompt
from core_rl_trainer.data.examples import (
    Example,
    ExampleCheck,
    check_demonstration,
    check_preference,
    check_prompt,
)
from core_rl_trainer.data.plain import MEDIA, OWN_FIELDS, json_text

IMAGES = "images"
"""The field of an example with its images, and of a sample with their names."""
Sample = Mapping[str, Any]
"""An encoded example, as the training loop takes it."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The tokens of a sample."""

    longest: int
    """Tokens of the longest sequence."""
    units: tuple[int, ...]
    """Tokens of each unit that stays in one micro-batch, a sequence or a pair, and patches of its images."""
    trained: int = 0
    """Tokens that are trained; none of a prompt."""
    images: int = 0

    @property
    def largest_unit(self) -> int:
        """Tokens of the largest unit."""
        return max(self.units)


@dataclass(frozen=True, kw_only=True)
class ExampleKind:
    """Fields, check and encoding of examples of some kind."""

    name: Literal["prompts", "demonstrations", "preferences"]
    noun: str
    """The name of a single example, in messages."""
    needs: str
    """The required fields, in messages."""
    fields: tuple[str, ...]
    """The usual fields."""
    check: ExampleCheck
    encode: Callable[[ChatFormat, Example], Sample]
    """Raises `BatchError` or `ConfigError` about the example."""
    sequences: Callable[[Sample], Sequence[Encoded]]
    """The token sequences of a sample, with the trained tokens of each."""
    paired: bool = False
    """Whether the sequences of a sample stay in one micro-batch."""

    def size(self, sample: Sample) -> Size:
        """The tokens of ``sample``."""
        sequences = self.sequences(sample)
        media = media_of(sample, len(sequences))
        lengths = tuple(len(ids) for ids, _ in sequences)
        trained = sum(sum(mask) for _, mask in sequences)
        computed = tuple(map(add, lengths, map(count_patches, media)))
        units = (sum(computed),) if self.paired else computed
        return Size(longest=max(lengths), units=units, trained=trained, images=len(images_of(sample)))


def images_of(sample: Sample) -> Sequence[Any]:
    """The names of the images of ``sample``; a column `IMAGES` that no model reads has any value."""
    return sample[IMAGES] if MEDIA in sample else ()


def media_of(sample: Sample, count: int) -> Sequence[Media]:
    """The images of each of the ``count`` sequences of ``sample``."""
    media: Sequence[Media] = sample.get(MEDIA) or [NO_MEDIA] * count
    return media


def _encode_prompt(chat_format: ChatFormat, example: Example) -> Sample:
    ids = encode_prompt(chat_format, example["prompt"], example)
    if not ids:
        raise BatchError("the prompt has no tokens; remove it or check the tokenizer")
    for name, value in example.items():
        if name in OWN_FIELDS:
            raise BatchError(f"has a column {name!r}, which is a field of the trainer; rename the column")
        try:
            json_text(value)
        except BatchError as error:
            raise BatchError(
                f"has a column {name!r} that {error}; remove it, or write it as a text"
            ) from error
    return {**example, "prompt_ids": ids}


def _encode_pair(chat_format: ChatFormat, example: Example) -> Sample:
    pair = {
        name: encode_completion(chat_format, example["prompt"], example[name], example)
        for name in ("chosen", "rejected")
    }
    for name, sequences in pair.items():
        if len(sequences) > 1:
            raise BatchError(
                f"has {len(sequences)} turns of the assistant in {name!r}, and the chat template renders a turn "
                "otherwise once others follow; end the prompt before the last turn"
            )
    if pair["chosen"] == pair["rejected"]:
        raise BatchError(
            "has equal tokens as 'chosen' and 'rejected': nothing can be learned from them; remove the row"
        )
    return {name: sequences[0] for name, sequences in pair.items()}


PROMPTS = ExampleKind(
    name="prompts",
    noun="prompt",
    needs="a 'prompt'",
    fields=("prompt",),
    check=check_prompt,
    encode=_encode_prompt,
    sequences=lambda sample: [(sample["prompt_ids"], [False] * len(sample["prompt_ids"]))],
)
"""Prompts of rollouts: the example with its ``prompt_ids``."""

DEMONSTRATIONS = ExampleKind(
    name="demonstrations",
    noun="example",
    needs="a 'prompt' and an 'answer', or 'messages'",
    fields=("prompt", "answer"),
    check=check_demonstration,
    encode=lambda chat_format, example: {"sequences": demonstration_sequences(chat_format, example)},
    sequences=lambda sample: sample["sequences"],
)
"""Sequences to imitate: ``sequences``, each token ids and mask."""

PREFERENCES = ExampleKind(
    name="preferences",
    noun="example",
    needs="a 'prompt', 'chosen' and 'rejected'",
    fields=("prompt", "chosen", "rejected"),
    check=check_preference,
    encode=_encode_pair,
    sequences=lambda sample: [sample["chosen"], sample["rejected"]],
    paired=True,
)
"""Pairs: ``chosen`` and ``rejected``, each token ids and mask."""


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
