"""Statistics of training data: lengths, tokens, and how well micro-batches are filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from core_rl.data.micro_batch import balanced, best_fit
from core_rl_trainer.data.datasets import SampleDataset
from core_rl_trainer.data.tokenizers import marked_text
from core_rl_trainer.data.training_data import TrainingData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEPS = 16
"""Steps whose micro-batches are counted."""
DRAWN = 256
"""The most examples of these steps."""


@dataclass(frozen=True, kw_only=True)
class SourceStatistics:
    """The examples of one source of training data."""

    origin: str
    format: str | None
    """The name of another system's format; null for the format of core-rl."""
    examples: int
    """Examples to train on."""
    left_out: int
    """Examples that cannot be trained and are left out."""
    share: float
    """The share of the source among the examples that are drawn."""
    tokens: int
    """Tokens of the examples."""
    trained: int
    """Tokens of them that are trained; 0 for prompts."""
    images: int
    """Images of them, each as often as an example has it."""
    sequences: int
    """Sequences: an example has several where its chat template renders earlier turns otherwise."""
    shortest: int
    median: float
    longest: int
    """Tokens of the longest example; ``shortest`` and ``median`` likewise."""

    def line(self) -> str:
        """One line for a person."""
        parts = (
            f"{self.origin}: {self.examples:,} examples",
            f"in the format {self.format}" if self.format else "",
            f"{self.share:.0%} of the draws" if self.share < 1 else "",
            f"{self.left_out:,} left out" if self.left_out else "",
            f"{self.sequences:,} sequences" if self.sequences > self.examples else "",
            f"{self.images:,} images" if self.images else "",
            f"{self.tokens:,} tokens",
            f"{self.trained:,} of them trained" if self.trained else "",
            f"{self.shortest:,} to {self.longest:,} each, median {self.median:,.0f}",
        )
        return ", ".join(part for part in parts if part)


PREVIEW = 2
"""Sequences of an example that are shown: as many as a preference has."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The micro-batches of the first steps."""

    fill: float
    """Share of ``micro_batch_tokens`` that holds tokens."""
    micro_batches: float
    """Micro-batches of a step on one rank, on average."""


@dataclass(frozen=True, kw_only=True)
class DataStatistics:
    """The training data of a run."""

    sources: tuple[SourceStatistics, ...]
    packing: Packing | None
    """None where completions are generated, whose lengths are not known before."""
    preview: tuple[str, ...]
    """The first `PREVIEW` sequences of the first example that is drawn, decoded, with trained tokens in ⟦ ⟧."""

    def lines(self) -> tuple[str, ...]:
        """Lines for a log: the sources, and the first example."""
        sources = "; ".join(part.line() for part in self.sources)
        packing = self.packing
        fill = f"; micro-batches are {packing.fill:.0%} full" if packing is not None else ""
        return (f"data: {sources}{fill}", *(f"first example: {text}" for text in self.preview))


def describe_data(
    data: TrainingData,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    batch_size: int,
    ranks: int,
    budget: int | None,
) -> DataStatistics:
    """Statistics of ``data``, whose order has the seed ``seed``.

    Packing is counted for steps of ``batch_size`` examples over ``ranks`` data-parallel ranks with micro-batches of
    ``budget`` tokens; None leaves it out.
    """
    parts = data.train.parts
    weights = data.train.weights or [float(len(part)) for part in parts]
    sources = tuple(
        _describe(part, weight / sum(weights)) for part, weight in zip(parts, weights, strict=True)
    )
    fits = budget is not None and data.train.largest_unit <= budget
    packing = _packing(data.train, seed, batch_size, ranks, budget) if fits and budget is not None else None
    first = data.kind.sequences(data.train[next(data.train.order(seed))])
    preview = tuple(marked_text(tokenizer, sequence) for sequence in first[:PREVIEW])
    return DataStatistics(sources=sources, packing=packing, preview=preview)


def _describe(part: SampleDataset, share: float) -> SourceStatistics:
    sizes = [part.size(index) for index in range(len(part))]
    lengths = [size.longest for size in sizes]
    return SourceStatistics(
        origin=part.origin,
        format=part.format,
        examples=len(part),
        left_out=part.left_out,
        share=share,
        tokens=sum(sum(size.units) for size in sizes),
        trained=sum(size.trained for size in sizes),
        images=sum(size.images for size in sizes),
        sequences=sum(len(size.units) for size in sizes),
        shortest=min(lengths),
        median=float(median(lengths)),
        longest=max(lengths),
    )


def _packing(train: SampleDataset, seed: int, batch_size: int, ranks: int, budget: int) -> Packing:
    """Micro-batches as `core_rl.data.micro_batch` counts them."""
    steps = max(1, min(STEPS, DRAWN // batch_size, -(-len(train) // batch_size)))
    order, tokens, counts = train.order(seed), 0, 0
    for _ in range(steps):
        units = [unit for _ in range(batch_size) for unit in train.size(next(order)).units]
        tokens += sum(units)
        counts += max(_count([units[n] for n in part], budget) for part in balanced(units, ranks))
    return Packing(fill=tokens / (counts * ranks * budget), micro_batches=counts / steps)


def _count(units: Sequence[int], budget: int) -> int:
    return max(1, len(best_fit(list(units), budget)))
