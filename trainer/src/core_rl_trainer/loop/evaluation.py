"""The result of an evaluation: means over the evaluation data, and some completions as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from core_rl.data.batch import SequenceBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Evaluation", "RolloutSample", "rollout_samples"]

SHOWN = 4
"""Completions that are kept of an evaluation: the first of each of the first prompts, so that they can be compared."""


@dataclass(frozen=True, kw_only=True)
class RolloutSample:
    """One episode as text, with its special tokens."""

    prompt: str
    segments: tuple[tuple[str, str], ...]
    """What follows the prompt: who wrote it, ``model`` or ``environment``, and the text."""
    reward: float
    tokens: int
    """Tokens that the model wrote."""
    versions: tuple[int, int]
    """The lowest and the highest version of the weights that they come from."""
    stop_reason: str


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics whose names begin with ``eval_``, and some of the completions behind them."""

    metrics: dict[str, float]
    samples: tuple[RolloutSample, ...] = ()


def rollout_samples(batch: SequenceBatch, tokenizer: PreTrainedTokenizerBase) -> tuple[RolloutSample, ...]:
    """The first sequence of each of the first groups of ``batch``: a completion of each of some prompts."""
    first: dict[int, int] = {}
    for number, group in enumerate(batch["group"].tolist()):
        first.setdefault(group, number)
    chosen = list(first.values())[:SHOWN]
    return tuple(_samples(batch.select(chosen), tokenizer))


def _samples(batch: SequenceBatch, tokenizer: PreTrainedTokenizerBase) -> Iterator[RolloutSample]:
    fields = (batch.input_ids, batch.loss_mask, batch["versions"])
    sequences = zip(*(values.split(batch.lengths) for values in fields), strict=True)
    for number, (ids, drawn, versions) in enumerate(sequences):
        runs = [
            (by_model, str(tokenizer.decode([token for token, _ in run])))
            for by_model, run in groupby(zip(ids.tolist(), drawn.tolist(), strict=True), lambda pair: pair[1])
        ]
        prompt = "" if runs[0][0] else runs.pop(0)[1]
        own = versions[drawn].tolist() or [-1]
        yield RolloutSample(
            prompt=prompt,
            segments=tuple(("model" if by_model else "environment", text) for by_model, text in runs),
            reward=float(batch["rewards"][number]),
            tokens=int(drawn.sum()),
            versions=(min(own), max(own)),
            stop_reason=str(batch.meta["stop_reason"][number]),
        )
