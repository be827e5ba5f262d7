"""Training data: encoded examples in memory, examples that are encoded when they are drawn, and mixtures of both."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate

from core_rl.errors import BatchError, ConfigError, raise_all
from core_rl.seeds import derive_seed
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.examples import Examples, place_in_parts
from core_rl_trainer.data.kinds import ExampleKind, Sample, Size
from core_rl_trainer.data.order import MixedOrder, Order, ShuffledOrder

__all__ = ["ExampleDataset", "MixedDataset", "SampleDataset", "StreamedDataset"]

logger = logging.getLogger(__name__)

SHOWN = 10
"""Damaged examples that an error lists."""


class SampleDataset(ABC):
    """Samples by number. The field ``index`` is this number, unless the example has a field of that name."""

    origin: str
    """The name of the source, in messages."""
    format: str | None = None
    """The name of another system's format, where the examples have it."""
    weights: Sequence[float] | None = None
    """The shares of ``parts`` among the drawn samples; None: each sample is drawn as often."""
    longest: int
    """Tokens of the longest sequence, at most."""
    largest_unit: int
    """Tokens of the most that stays in one micro-batch: a sequence, or a pair."""
    most_sequences: int = 1
    """The most sequences of a sample, as far as they are known."""
    left_out: int = 0
    """Examples that are too long, so far."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:
        """One sample."""

    @abstractmethod
    def order(self, seed: int) -> Order:
        """The endless order in which samples are drawn."""

    @abstractmethod
    def size(self, index: int) -> Size:
        """The tokens of one sample."""

    @property
    def parts(self) -> Sequence[SampleDataset]:
        """The datasets of the sources."""
        return (self,)

    def accepts(self, index: int) -> bool:
        """Whether the sample is short enough to be drawn."""
        return True

    def measured(self, seed: int, most: int) -> list[Size]:
        """The sizes of all samples, or of the first ``most`` in the order of ``seed`` where that is costly."""
        return [self.size(index) for index in range(len(self))]


class ExampleDataset(SampleDataset):
    """``examples``, checked and encoded at once and kept in memory.

    ``limit`` is the most tokens of a sequence; longer ones are an error that names them, or, with ``drop``, left out.
    Pairs of two equal sequences are left out. ``first`` is the number of the first sample. Raises one `BatchError` that
    names every damaged example (the first ten), and one when there is none.
    """

    def __init__(
        self,
        examples: Examples,
        kind: ExampleKind,
        chat_format: ChatFormat,
        drop: bool = False,
        limit: int | None = None,
        first: int = 0,
    ) -> None:
        self.origin, self.format = examples.origin, examples.format
        samples = _without_ties(kind, examples, _encoded(kind, examples, chat_format))
        sizes = {number: kind.size(sample) for number, sample in samples.items()}
        lengths = {number: size.longest for number, size in sizes.items()}
        accepted = _within_limit(kind, examples, lengths, limit, drop)
        self.left_out = len(samples) - len(accepted)
        self._samples = [{"index": first + index, **samples[n]} for index, n in enumerate(accepted)]
        self._sizes = [sizes[n] for n in accepted]
        self.longest = max(size.longest for size in self._sizes)
        self.largest_unit = max(size.largest_unit for size in self._sizes)
        self.most_sequences = max(len(size.units) for size in self._sizes)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]

    def order(self, seed: int) -> Order:
        return ShuffledOrder(len(self), seed)

    def size(self, index: int) -> Size:
        return self._sizes[index]


class StreamedDataset(SampleDataset):
    """``examples``, each read, checked and encoded when it is drawn.

    A sequence of more than ``limit`` tokens, or a pair of more than ``budget``, is an error when it is drawn, or, with
    ``drop``, skipped.
    """

    def __init__(
        self,
        examples: Examples,
        kind: ExampleKind,
        chat_format: ChatFormat,
        drop: bool,
        limit: int | None,
        first: int,
        budget: int,
    ) -> None:
        _require_some(kind, examples)
        self.origin, self.format = examples.origin, examples.format
        self._kind, self._examples, self._chat_format = kind, examples, chat_format
        self._drop, self._first = drop, first
        self.longest = budget if limit is None else min(limit, budget)
        self.largest_unit = budget
        self._drawn: dict[int, Sample] = {}
        self._too_long: set[int] = set()
        self._skipped = 0
        self._warned_of_ties = False

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Sample:
        sample = self._take(index)
        return {"index": self._first + index, **sample}

    def order(self, seed: int) -> Order:
        return ShuffledOrder(len(self), seed, self.accepts)

    def size(self, index: int) -> Size:
        return self._kind.size(self._take(index))

    def measured(self, seed: int, most: int) -> list[Size]:
        order = self.order(seed)
        return [self.size(next(order)) for _ in range(min(most, len(self)))]

    def _take(self, index: int) -> Sample:
        return self._drawn.pop(index) if index in self._drawn else self._encode(index)

    def _encode(self, index: int) -> Sample:
        try:
            return _encode(self._kind, self._examples, index, self._chat_format)
        except BatchError as error:
            raise BatchError(f"{self.origin}: {error}") from error

    def accepts(self, index: int) -> bool:
        """Whether the example is short enough; it is kept until it is fetched."""
        sample = self._encode(index)
        if self._kind.is_tie(sample):
            return self._skip_tie(index)
        size = self._kind.size(sample)
        if size.longest <= self.longest and size.largest_unit <= self.largest_unit:
            self._drawn[index], self._skipped = sample, 0
            return True
        new = index not in self._too_long
        self._too_long.add(index)
        self.left_out, self._skipped = len(self._too_long), self._skipped + 1
        most = self.longest if size.longest > self.longest else self.largest_unit
        text = f"{self._examples.label(index)} has {size.largest_unit} tokens, and {most} fit"
        if not self._drop or self._skipped > len(self):
            raise BatchError(f"{self.origin}: {text}; shorten it, or set data.too_long=drop")
        if new and f"{self.left_out}".rstrip("0") == "1":  # 1, 10, 100, …
            logger.warning("%s: %s; %d are left out so far", self.origin, text, self.left_out)
        return False

    def _skip_tie(self, index: int) -> bool:
        """False, with a warning for the first pair of two equal sequences."""
        self._skipped += 1
        text = f"{self._examples.label(index)} has equal tokens as 'chosen' and 'rejected'"
        if self._skipped > len(self):
            raise BatchError(f"{self.origin}: {text}, as all others; nothing can be learned from them")
        if not self._warned_of_ties:
            logger.warning("%s: %s; such pairs are left out", self.origin, text)
        self._warned_of_ties = True
        return False


class MixedDataset(SampleDataset):
    """The samples of all ``parts`` in one numbering; drawn by ``weights``, or each as often as any other."""

    def __init__(self, parts: Sequence[SampleDataset], weights: Sequence[float] | None = None) -> None:
        self.origin = ", ".join(part.origin for part in parts)
        self.weights = weights
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))
        self.longest = max(part.longest for part in parts)
        self.largest_unit = max(part.largest_unit for part in parts)
        self.most_sequences = max(part.most_sequences for part in parts)

    @property
    def parts(self) -> Sequence[SampleDataset]:
        return self._parts

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        part, number = self._place(index)
        return part[number]

    def order(self, seed: int) -> Order:
        if self.weights is None:
            return ShuffledOrder(len(self), seed, self.accepts)
        orders = [part.order(derive_seed(seed, number)) for number, part in enumerate(self.parts)]
        return MixedOrder(orders, [len(part) for part in self.parts], self.weights)

    def size(self, index: int) -> Size:
        part, number = self._place(index)
        return part.size(number)

    def accepts(self, index: int) -> bool:
        part, number = self._place(index)
        return part.accepts(number)

    def _place(self, index: int) -> tuple[SampleDataset, int]:
        part, number = place_in_parts(self._ends, index)
        return self.parts[part], number


def _encoded(kind: ExampleKind, examples: Examples, chat_format: ChatFormat) -> dict[int, Sample]:
    """All samples by number; damaged examples are named together."""
    _require_some(kind, examples)
    samples: dict[int, Sample] = {}
    problems: list[str] = []
    for index in range(len(examples)):
        try:
            samples[index] = _encode(kind, examples, index, chat_format)
        except BatchError as error:
            problems.append(str(error))
    raise_all(BatchError, examples.origin, problems, most=SHOWN)
    return samples


def _without_ties(kind: ExampleKind, examples: Examples, samples: dict[int, Sample]) -> dict[int, Sample]:
    """``samples`` without pairs of two equal sequences; `BatchError` where there is nothing else."""
    ties = [number for number, sample in samples.items() if kind.is_tie(sample)]
    if not ties:
        return samples
    text = (
        f"{len(ties)} of {len(samples)} pairs have equal tokens as 'chosen' and 'rejected': "
        f"{', '.join(map(examples.label, ties[:3]))}{', …' if len(ties) > 3 else ''}"
    )
    if len(ties) == len(samples):
        raise BatchError(f"{examples.origin}: {text}; nothing can be learned from them")
    logger.warning("%s: %s; they are left out", examples.origin, text)
    equal = set(ties)
    return {number: sample for number, sample in samples.items() if number not in equal}


def _encode(kind: ExampleKind, examples: Examples, index: int, chat_format: ChatFormat) -> Sample:
    """The sample of one example; `BatchError` with its label when it is damaged, `ConfigError` with its source."""
    example = examples[index]
    if (problem := kind.check(example)) is not None:
        raise BatchError(f"{examples.label(index)} {problem}")
    try:
        return kind.encode(chat_format, example)
    except BatchError as error:
        raise BatchError(f"{examples.label(index)}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{examples.origin}: {examples.label(index)}: {error}") from error


def _require_some(kind: ExampleKind, examples: Examples) -> None:
    if not len(examples):
        raise BatchError(f"{examples.origin} has no {kind.noun}s; write one with {kind.needs} on each line")


def _within_limit(
    kind: ExampleKind, examples: Examples, lengths: Mapping[int, int], limit: int | None, drop: bool
) -> list[int]:
    """The numbers of the examples of at most ``limit`` tokens; see `ExampleDataset`."""
    wrong = [n for n, length in lengths.items() if limit is not None and length > limit]
    if not wrong:
        return list(lengths)
    counted = f"{len(wrong)} of {len(lengths)} {kind.noun}s"
    text = f"{counted} are longer than the {limit} tokens that the model's context leaves"
    if not drop or len(wrong) == len(lengths):
        shown = ", ".join(f"{examples.label(n)} ({lengths[n]} tokens)" for n in wrong[:3])
        raise BatchError(
            f"{examples.origin}: {text}: {shown}. Shorten them, lower rollout.max_new_tokens where there are rollouts, "
            "or set data.too_long=drop"
        )
    logger.warning("%s: %s; they are left out", examples.origin, text)
    longer = set(wrong)
    return [n for n in lengths if n not in longer]
