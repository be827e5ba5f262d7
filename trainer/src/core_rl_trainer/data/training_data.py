"""The data of a run: read, mapped, split, checked and encoded, by the section ``data`` of its recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core_rl.errors import BatchError, ConfigError, raise_all
from core_rl.seeds import derive_seed
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.columns import mapped
from core_rl_trainer.data.config import DataSection, DataSource
from core_rl_trainer.data.datasets import ExampleDataset, MixedDataset, SampleDataset
from core_rl_trainer.data.examples import Examples
from core_rl_trainer.data.image_fields import located
from core_rl_trainer.data.images import ImageEncoder, images_digest, with_images, without_images
from core_rl_trainer.data.kinds import ExampleKind, within_vocabulary
from core_rl_trainer.data.sources import is_hub_dataset, open_source
from core_rl_trainer.data.tokenizers import all_end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLIT = 0x5EED
"""Separates the seed of the split from the seeds of the data order."""
Encode = Callable[[Examples, int], SampleDataset]
"""Makes a dataset of examples, whose first sample has the given number."""


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
        rows = {name: part.digest() for name, part in parts.items() if part.digest is not None}
        images = {
            f"{name}.images": digest
            for name, part in parts.items()
            if (digest := images_digest(part[index] for index in range(len(part))))
        }
        return rows | images


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
    vision = vision_model is not None
    sources = [_open(section, kind, source, "train", vision) for source in section.train]
    common = (within_vocabulary(kind, vocabulary), chat_format, section.unusable == "drop", limit)

    def encode_all(examples: Examples, first: int) -> SampleDataset:
        return ExampleDataset(examples, *common, first)

    held_out, examples = (
        [_open(section, kind, source, None, vision) for source in section.eval or ()],
        sources,
    )
    if section.eval_fraction is not None:
        parts = [_split(part, section.eval_fraction, seed) for part in examples]
        examples, held_out = [train for train, _ in parts], [part for _, part in parts if len(part)]
        _require_split(section.eval_fraction, examples, held_out, sources)
    train = _encoded(examples, encode_all)
    _require_chats(section, sources)
    weights = [source.weight for source in section.train if source.weight is not None]
    return TrainingData(
        kind=kind,
        train=_joined(train, weights or None),
        held_out=_joined(_encoded(held_out, encode_all), None) if held_out else None,
    )


def _encoded(parts: Sequence[Examples], encode: Encode) -> tuple[SampleDataset, ...]:
    """One dataset for each part; their samples are numbered consecutively."""
    datasets: list[SampleDataset] = []
    for examples in parts:
        datasets.append(encode(examples, sum(map(len, datasets))))
    return tuple(datasets)


def _open(
    section: DataSection, kind: ExampleKind, source: DataSource, default_split: str | None, vision: bool
) -> Examples:
    examples = mapped(open_source(source, default_split), section.columns | source.columns, kind)
    if not vision:
        return examples
    path = Path(source.path)
    directory = path if path.is_dir() else path.parent
    return located(examples, None if is_hub_dataset(source) else directory)


def _require_chats(section: DataSection, sources: Sequence[Examples]) -> None:
    """Raise `ConfigError` for settings of the chat template where the first examples are texts."""
    settings = {"chat_template": section.chat_template, "template_args": section.template_args}
    if not any(settings.values()):
        return
    if any(_has_chat(examples) for examples in sources):
        return
    problems = [
        f"{name} = {value!r}: the data has texts, which no chat template renders; remove it, or write messages"
        for name, value in settings.items()
        if value
    ]
    raise_all(ConfigError, "data", problems)


def _has_chat(examples: Examples) -> bool:
    for index in range(len(examples)):
        with suppress(BatchError):  # of a row that is left out
            example = examples[index]
            if isinstance(example.get("messages") or example.get("prompt"), list):
                return True
    return False


def _joined(parts: Sequence[SampleDataset], weights: Sequence[float] | None) -> SampleDataset:
    return parts[0] if len(parts) == 1 else MixedDataset(parts, weights)


def _selected(examples: Examples, numbers: Tensor) -> Examples:
    """Some of the examples of a source in their order there, with the labels that they have there."""
    numbers = numbers.sort().values
    return replace(
        examples,
        count=len(numbers),
        read=lambda index: examples[int(numbers[index])],
        label=lambda index: examples.label(int(numbers[index])),
        row=lambda index: examples.row(int(numbers[index])),
    )


def _split(examples: Examples, fraction: float, seed: int) -> tuple[Examples, Examples]:
    """Examples to train on and to evaluate, in their order in the source; a function of size and seed."""
    count = round(fraction * len(examples))
    generator = torch.Generator().manual_seed(derive_seed(seed, SPLIT))
    shuffled = torch.randperm(len(examples), generator=generator)
    held_out = replace(examples, digest=None)  # which training counts
    return _selected(examples, shuffled[count:]), _selected(held_out, shuffled[:count])


def _require_split(
    fraction: float, train: Sequence[Examples], held_out: Sequence[Examples], sources: Sequence[Examples]
) -> None:
    """Raise `BatchError` when the split leaves nothing on one side."""
    total = sum(map(len, sources))
    origins = ", ".join(examples.origin for examples in sources)
    if total and not held_out:
        raise BatchError(
            f"data.eval_fraction = {fraction} of the {total} examples in {origins} holds out none; raise it, or name "
            "other data in data.eval"
        )
    empty = [
        part.origin for part, examples in zip(train, sources, strict=True) if len(examples) and not len(part)
    ]
    if empty:
        raise BatchError(
            f"data.eval_fraction = {fraction} of the examples in {empty[0]} leaves none to train on; lower it"
        )
