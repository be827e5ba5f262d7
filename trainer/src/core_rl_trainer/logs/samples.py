"""The result of an evaluation: means over the evaluation data, and some completions or examples as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core_rl.data.batch import SequenceBatch
from core_rl_trainer.data.image_files import ImageName, small_copy
from core_rl_trainer.data.kinds import images_of
from core_rl_trainer.data.plain import json_text
from core_rl_trainer.data.tokenizers import decoded_runs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Segments = tuple[tuple[str, str], ...]

SHOWN = 4
"""Prompts or examples of an evaluation whose texts are written: the first, so that they can be compared."""

LARGEST_SIDE = 160
"""Pixels of the copy of an image, next to the text."""


@dataclass(frozen=True, kw_only=True)
class RolloutSample:
    """One episode as text, with its special tokens."""

    prompt: str
    segments: Segments
    """Texts after the prompt, each with its author: ``model`` or ``environment``."""
    images: tuple[str, ...] = ()
    """Files of the images of the prompt."""
    reward: float
    tokens: int
    """Tokens that the model wrote."""
    versions: tuple[int, int]
    """The lowest and the highest version of the weights that they come from."""
    stop_reason: str
    answer: str | None = None
    """The expected answer, where the example has the field ``answer``."""


@dataclass(frozen=True, kw_only=True)
class ExampleSample:
    """A sequence of an example as text, with its special tokens."""

    title: str
    """``example``, or its place in a pair: ``chosen`` or ``rejected``."""
    prompt: str
    segments: Segments
    """Trained tokens as ``model``, the tokens between them as ``environment``."""
    images: tuple[str, ...] = ()
    """Files of the images of the example."""
    tokens: int
    """Trained tokens."""
    metrics: dict[str, float | None]
    """Metrics of the example alone; None for a number that is not finite."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics whose names begin with ``eval_``, and some of the completions or examples behind them."""

    metrics: dict[str, float]
    samples: tuple[RolloutSample, ...] | tuple[ExampleSample, ...] = ()


def rollout_samples(
    batch: SequenceBatch, tokenizer: PreTrainedTokenizerBase, samples: Sequence[Mapping[str, Any]]
) -> tuple[RolloutSample, ...]:
    """A completion of each of the first prompts; the groups of ``batch`` are the numbers of ``samples``."""
    first: dict[int, int] = {}
    for number, group in enumerate(batch["group"].tolist()):
        first.setdefault(group, number)
    examples = [samples[group] for group in list(first)[:SHOWN]]
    batch = batch.select(list(first.values())[:SHOWN])
    fields = (batch.input_ids, batch.loss_mask, batch["versions"])
    sequences = zip(*(values.split(batch.lengths) for values in fields), strict=True)
    shown = []
    for number, (ids, drawn, versions) in enumerate(sequences):
        prompt, segments = _texts(ids.tolist(), drawn.tolist(), tokenizer)
        drawn_versions = versions[drawn].tolist() or [-1]
        sample = RolloutSample(
            prompt=prompt,
            segments=segments,
            reward=float(batch["rewards"][number]),
            tokens=int(drawn.sum()),
            versions=(min(drawn_versions), max(drawn_versions)),
            stop_reason=str(batch.meta["stop_reason"][number]),
            answer=_answer(examples[number].get("answer")),
            images=_shown_images(images_of(examples[number])),
        )
        shown.append(sample)
    return tuple(shown)


def example_samples(
    batch: SequenceBatch,
    titles: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    metrics: Mapping[str, float],
    images: Sequence[ImageName] = (),
) -> tuple[ExampleSample, ...]:
    """The sequences of one example, called ``titles``, with its ``metrics`` and the files of its ``images``."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    sequences = zip(
        titles, batch.input_ids.split(batch.lengths), batch.loss_mask.split(batch.lengths), strict=True
    )
    samples = []
    for title, ids, trained in sequences:
        prompt, segments = _texts(ids.tolist(), trained.tolist(), tokenizer)
        tokens = int(trained.sum())
        sample = ExampleSample(
            title=title,
            prompt=prompt,
            segments=segments,
            tokens=tokens,
            metrics=finite,
            images=_shown_images(images),
        )
        samples.append(sample)
    return tuple(samples)


def _shown_images(images: Sequence[ImageName]) -> tuple[str, ...]:
    """The paths of files, and small copies of embedded images as data URIs."""
    return tuple(
        str(image) if image.content is None else small_copy(image.content, LARGEST_SIDE) or str(image)
        for image in images
    )


def _texts(
    ids: Sequence[int], marked: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, Segments]:
    """The text before the first of the ``marked`` tokens, and the texts from there on."""
    runs = decoded_runs(tokenizer, ids, marked)
    prompt = "" if runs[0][0] else runs.pop(0)[1]
    return prompt, tuple(("model" if by_model else "environment", text) for by_model, text in runs)


def _answer(value: Any) -> str | None:
    """An answer of the data as text."""
    if value is None or isinstance(value, str):
        return value
    return json_text(value)
