"""A summary of training data: the examples and tokens of each source, and the first example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from core_rl_trainer.data.tokenizers import marked_text
from core_rl_trainer.data.training_data import TrainingData

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREVIEW = 2
"""Sequences of an example that are shown: as many as a preference has."""


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
