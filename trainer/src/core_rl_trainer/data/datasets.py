"""Training data: encoded examples in memory, and mixtures of them."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate

from core_rl.errors import BatchError, ConfigError, raise_all
from core_rl.seeds import derive_seed
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.columns import unused_columns
from core_rl_trainer.data.examples import Example, Examples, place_in_parts
from core_rl_trainer.data.image_fields import CHATS, all_texts
from core_rl_trainer.data.kinds import ExampleKind, Sample, Size, images_of
from core_rl_trainer.data.order import MixedOrder, Order, ShuffledOrder

logger = logging.getLogger(__name__)

PLACES = re.compile(r"<(?:image|video|audio)>")
"""Places of files, which other systems read."""
SHOWN = 10
"""Unusable examples that an error lists."""
NAMED = 3
"""Unusable examples that a warning names."""


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
    most_sequences: int
    """The most sequences of a sample."""
    left_out: int = 0
    """Examples that cannot be trained and were left out."""
    digest: Callable[[], str] | None = None
    """Returns the digest of the rows of the Hub that these samples are from."""

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

    @abstractmethod
    def row_of(self, index: int) -> tuple[int, int]:
        """The number of the source of a sample, and of its row there, before others were dropped or held out."""

    @abstractmethod
    def index_of(self, source: int, row: int) -> int:
        """The sample of this row. Raises `KeyError` where no sample has it."""


class ExampleDataset(SampleDataset):
    """``examples``, checked and encoded at once and kept in memory.

    A sequence has at most ``limit`` tokens. Unusable examples are one `BatchError` that names them (the first ten), or,
    with ``drop``, left out with a warning; `BatchError` where there is no other. ``first`` is the number of the first
    sample.
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
        self.origin, self.format, self.digest = examples.origin, examples.format, examples.digest
        samples = _usable(kind, examples, chat_format, drop, limit)
        self.left_out = len(examples) - len(samples)
        self._samples = [{"index": first + index, **sample} for index, sample in enumerate(samples.values())]
        self._sizes = [kind.size(sample) for sample in samples.values()]
        self._rows = [examples.row(number) for number in samples]
        self._indices = {row: index for index, row in enumerate(self._rows)}
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

    def row_of(self, index: int) -> tuple[int, int]:
        return 0, self._rows[index]

    def index_of(self, source: int, row: int) -> int:
        return self._indices[row]


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
            return ShuffledOrder(len(self), seed)
        orders = [part.order(derive_seed(seed, number)) for number, part in enumerate(self.parts)]
        return MixedOrder(orders, [len(part) for part in self.parts], self.weights)

    def size(self, index: int) -> Size:
        part, number = self._place(index)
        return part.size(number)

    def row_of(self, index: int) -> tuple[int, int]:
        source, number = place_in_parts(self._ends, index)
        return source, self.parts[source].row_of(number)[1]

    def index_of(self, source: int, row: int) -> int:
        part = self.parts[source]
        return self._ends[source] - len(part) + part.index_of(0, row)

    def _place(self, index: int) -> tuple[SampleDataset, int]:
        part, number = place_in_parts(self._ends, index)
        return self.parts[part], number


def _usable(
    kind: ExampleKind, examples: Examples, chat_format: ChatFormat, drop: bool, limit: int | None
) -> dict[int, Sample]:
    """Samples by number; see `ExampleDataset`."""
    if not len(examples):
        raise BatchError(f"{examples.origin} has no {kind.noun}s; write one with {kind.needs} on each line")
    samples: dict[int, Sample] = {}
    problems: list[str] = []
    unused: dict[str, None] = {}
    places: dict[str, None] = {}
    for index in range(len(examples)):
        try:
            example = examples[index]
            sample = _encode(kind, examples, index, example, chat_format)
            _check_length(kind, sample, limit, examples.label(index))
            samples[index] = sample
            names = unused_columns(example, kind, chat_format.words, bool(images_of(sample)))
            unused |= dict.fromkeys(names)
            texts = () if images_of(sample) else all_texts([example.get(name) for name in (*CHATS, "text")])
            places |= dict.fromkeys(place for text in texts for place in PLACES.findall(text))
        except BatchError as error:
            problems.append(str(error))
    if unused:
        logger.warning("%s: columns not used: %s", examples.origin, ", ".join(map(repr, unused)))
    if places:
        logger.warning("%s: trained as text, without an image: %s", examples.origin, ", ".join(places))
    if not drop or not samples:
        raise_all(BatchError, examples.origin, _with_fix(problems, bool(samples)), most=SHOWN)
    elif problems:
        more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        logger.warning(
            "%s: %d of %d %ss cannot be trained and are left out: %s%s",
            examples.origin,
            len(problems),
            len(examples),
            kind.noun,
            "; ".join(problems[:NAMED]),
            more,
        )
    return samples


def _with_fix(problems: list[str], others: bool) -> list[str]:
    """``problems``, of which the first says how to train on the other examples, where there are any."""
    if not problems or not others:
        return problems
    return [
        f"{problems[0]} (or leave out all rows that cannot be trained: data.unusable=drop)",
        *problems[1:],
    ]


def _check_length(kind: ExampleKind, sample: Sample, limit: int | None, label: str) -> None:
    """Raise `BatchError` for a sequence of more than ``limit`` tokens."""
    longest = kind.size(sample).longest
    if limit is not None and longest > limit:
        raise BatchError(
            f"{label} has {longest} tokens, longer than the {limit} tokens that the model's context leaves; shorten "
            "it, or lower rollout.max_new_tokens where there are rollouts"
        )


def _encode(
    kind: ExampleKind, examples: Examples, index: int, example: Example, chat_format: ChatFormat
) -> Sample:
    """The sample of one example; `BatchError` with its label when it is damaged, `ConfigError` with its source."""
    if (problem := kind.check(example)) is not None:
        raise BatchError(f"{examples.label(index)} {problem}")
    try:
        return kind.encode(chat_format, example)
    except BatchError as error:
        raise BatchError(f"{examples.label(index)}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{examples.origin}: {examples.label(index)}: {error}") from error
