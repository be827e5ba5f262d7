"""The result of an evaluation: means over the evaluation data, and some completions or examples as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

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
class TextSample:
    """A sequence as text, with its special tokens."""

    prompt: str
    segments: Segments
    """Texts after the prompt: ``model`` wrote or is trained on them, and ``environment`` stands for the others."""
    images: tuple[str, ...] = ()
    """Files of the images."""
    tokens: int
    """Tokens that the model wrote, or is trained on."""


@dataclass(frozen=True, kw_only=True)
class RolloutSample(TextSample):
    """One episode."""

    reward: float
    versions: tuple[int, int]
    """The lowest and the highest version of the weights that they come from."""
    stop_reason: str
    answer: str | None = None
    """The expected answer, where the example has the field ``answer``."""


@dataclass(frozen=True, kw_only=True)
class ExampleSample(TextSample):
    """A sequence of an example."""

    title: str
    """``example``, or its place in a pair: ``chosen`` or ``rejected``."""
    metrics: dict[str, float | None]
    """Metrics of the example alone; None for a number that is not finite."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics whose names begin with ``eval_``, and some of the completions or examples behind them."""

    metrics: dict[str, float]
    samples: tuple[TextSample, ...] = ()


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
        drawn_versions = versions[drawn].tolist() or [-1]
        answer = examples[number].get("answer")
        sample = RolloutSample(
            **_text_fields(ids, drawn, tokenizer, images_of(examples[number])),
            reward=float(batch["rewards"][number]),
            versions=(min(drawn_versions), max(drawn_versions)),
            stop_reason=str(batch.meta["stop_reason"][number]),
            answer=answer if answer is None or isinstance(answer, str) else json_text(answer),
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
    return tuple(
        ExampleSample(**_text_fields(ids, trained, tokenizer, images), title=title, metrics=finite)
        for title, ids, trained in sequences
    )


def _text_fields(
    ids: Tensor, marked: Tensor, tokenizer: PreTrainedTokenizerBase, images: Sequence[ImageName]
) -> dict[str, Any]:
    """The fields of a `TextSample`, whose prompt ends before the first of the ``marked`` tokens.

    ``images`` are shown by the paths of files, and embedded ones by small copies as data URIs.
    """
    runs = decoded_runs(tokenizer, ids.tolist(), marked.tolist())
    return {
        "prompt": "" if runs[0][0] else runs.pop(0)[1],
        "segments": tuple(("model" if by_model else "environment", text) for by_model, text in runs),
        "tokens": int(marked.sum()),
        "images": tuple(
            str(image) if image.content is None else small_copy(image.content, LARGEST_SIDE) or str(image)
            for image in images
        ),
    }
