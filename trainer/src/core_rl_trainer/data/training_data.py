"""The data of a run: read, mapped, split, checked and encoded, by the section ``data`` of its recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from core_rl.errors import BatchError, ConfigError, raise_all
from core_rl.seeds import derive_seed
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.columns import check_fields, mapped
from core_rl_trainer.data.config import DataSection, DataSource
from core_rl_trainer.data.datasets import SampleDataset, SourceSamples, encode_examples
from core_rl_trainer.data.examples import Examples
from core_rl_trainer.data.image_fields import located
from core_rl_trainer.data.images import ImageEncoder, images_digest, with_images, without_images
from core_rl_trainer.data.kinds import ExampleKind, within_vocabulary
from core_rl_trainer.data.sources import is_hub_dataset, open_source
from core_rl_trainer.data.tokenizers import all_end_tokens, marked_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREVIEW = 2
"""Sequences of an example that are shown: as many as a preference has."""
SPLIT = 0x5EED
"""Separates the seed of the split from the seeds of the data order."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The samples of a run."""

    kind: ExampleKind
    train: SampleDataset
    held_out: SampleDataset | None
    """Samples for evaluation; None: there is no evaluation."""

    def digests(self) -> dict[str, str]:
        """The sha256 of the rows of each dataset of the Hub, and of the image files of each source.

        Names are those of the fields, such as ``data.train.0`` and ``data.train.0.images``.
        """
        parts = {
            f"data.{field}.{number}": part
            for field, dataset in (("train", self.train), ("eval", self.held_out))
            for number, part in enumerate(dataset.parts if dataset is not None else ())
        }
        rows = {name: part.digest for name, part in parts.items() if part.digest is not None}
        images = {f"{name}.images": images_digest(part.samples) for name, part in parts.items()}
        return rows | {name: digest for name, digest in images.items() if digest is not None}


def load_training_data(
    section: DataSection,
    kind: ExampleKind,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    limit: int | None,
    vocabulary: int,
    vision_model: str | None = None,
) -> TrainingData:
    """Read and encode the examples of ``section``; ``seed`` draws the share ``eval_fraction``.

    A sequence has at most ``limit`` tokens, None for any number. The model has embeddings for ``vocabulary`` ids.
    Examples may have images for the model in the directory ``vision_model``. Raises `ConfigError` and
    `BatchError` for data that is missing, of another type, or damaged.
    """
    chat_format = ChatFormat(
        tokenizer=tokenizer,
        template_name=section.chat_template,
        arguments=section.template_args,
        time=section.template_time,
        ends=all_end_tokens(tokenizer),
    )
    if vision_model is None:
        kind = without_images(kind)
    else:
        kind = with_images(kind, ImageEncoder.of(vision_model, tokenizer, section.max_image_pixels))
    sources, evaluation = (
        [_open(section, kind, source, split, vision_model is not None) for source in listed or ()]
        for listed, split in ((section.train, "train"), (section.eval, None))
    )
    examples = sources
    if section.eval_fraction is not None:
        examples, evaluation = _split(sources, section.eval_fraction, seed)

    def encoded(parts: Sequence[Examples]) -> list[SourceSamples]:
        known = within_vocabulary(kind, vocabulary)
        return [
            encode_examples(part, known, chat_format, section.unusable == "drop", limit) for part in parts
        ]

    train = encoded(examples)
    _require_chats(section, sources)
    weights = [source.weight for source in section.train if source.weight is not None]
    return TrainingData(
        kind=kind,
        train=SampleDataset(train, weights or None),
        held_out=SampleDataset(encoded(evaluation)) if evaluation else None,
    )


def _open(
    section: DataSection, kind: ExampleKind, source: DataSource, default_split: str | None, vision: bool
) -> Examples:
    original, columns = open_source(source, default_split), section.columns | source.columns
    examples = mapped(original, columns, kind)
    if vision:
        path = Path(source.path)
        directory = path if path.is_dir() else path.parent
        examples = located(examples, None if is_hub_dataset(source) else directory)
    check_fields(original, examples, columns, kind)
    return examples


def _require_chats(section: DataSection, sources: Sequence[Examples]) -> None:
    """Raise `ConfigError` for settings of the chat template where the first examples are texts."""
    settings = {"chat_template": section.chat_template, "template_args": section.template_args}
    if not any(settings.values()):
        return
    rows = (row.example for examples in sources for row in examples.readable())
    if any(isinstance(example.get("messages") or example.get("prompt"), list) for example in rows):
        return
    problems = [
        f"{name} = {value!r}: the data has texts, which no chat template renders; remove it, or write messages"
        for name, value in settings.items()
        if value
    ]
    raise_all(ConfigError, "data", problems)


def _split(sources: Sequence[Examples], fraction: float, seed: int) -> tuple[list[Examples], list[Examples]]:
    """Examples of each source to train on, and those to evaluate, in their order in the source.

    A function of size and seed. Raises `BatchError` when it leaves nothing on one side.
    """
    train: list[Examples] = []
    held_out: list[Examples] = []
    for examples in sources:
        generator = torch.Generator().manual_seed(derive_seed(seed, SPLIT))
        numbers = torch.randperm(len(examples), generator=generator).tolist()
        count = round(fraction * len(examples))
        first, second = (
            [examples.rows[n] for n in sorted(part)] for part in (numbers[count:], numbers[:count])
        )
        if numbers and not first:
            raise BatchError(
                f"data.eval_fraction = {fraction} of the examples in {examples.origin} leaves none to train on; "
                "lower it"
            )
        train.append(replace(examples, rows=first))
        if second:  # the rows of the Hub are in the digest of the training data
            held_out.append(replace(examples, rows=second, digest=None))
    total = sum(map(len, sources))
    if total and not held_out:
        origins = ", ".join(examples.origin for examples in sources)
        raise BatchError(
            f"data.eval_fraction = {fraction} of the {total} examples in {origins} holds out none; raise it, or name "
            "other data in data.eval"
        )
    return train, held_out


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """The training data of a run."""

    sources: str
    """Examples and tokens of each source, in one line."""
    preview: tuple[str, ...]
    """The first `PREVIEW` sequences of the first example that is drawn, decoded, with trained tokens in ⟦ ⟧."""

    def lines(self) -> tuple[str, ...]:
        """Lines for a log."""
        return (f"data: {self.sources}", *(f"first example: {text}" for text in self.preview))


def summarize_data(data: TrainingData, tokenizer: PreTrainedTokenizerBase, seed: int) -> DataSummary:
    """The summary of ``data``, whose order has the seed ``seed``."""
    sources = [
        f"{part.origin}: {len(part):,} examples"
        + (f" in the format {part.format}" if part.format else "")
        + (f" ({part.left_out:,} left out)" if part.left_out else "")
        + f", {sum(sum(size.units) for size in part.sizes):,} tokens"
        for part in data.train.parts
    ]
    first = data.kind.sequences(data.train[next(data.train.order(seed))])
    preview = tuple(marked_text(tokenizer, sequence) for sequence in first[:PREVIEW])
    return DataSummary(sources="; ".join(sources), preview=preview)
