"""Samples of training data: checked and encoded examples in memory, their mixtures, and the orders of a run."""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from core_rl.errors import BatchError, ConfigError, raise_all
from core_rl.seeds import derive_seed
from core_rl_trainer.data.chat_template import ChatFormat
from core_rl_trainer.data.columns import unused_columns
from core_rl_trainer.data.examples import Examples, Row
from core_rl_trainer.data.image_fields import CHATS, all_texts
from core_rl_trainer.data.kinds import ExampleKind, Sample, Size, images_of

logger = logging.getLogger(__name__)

PLACES = re.compile(r"<(?:image|video|audio)>|<img>(?=[^<>\n]+</img>)")
"""Places of files, which other systems read."""
SHOWN = 10
"""Unusable examples that an error lists."""
NAMED = 3
"""Unusable examples that a warning names."""


# ---------------------------------------------------------------------- orders


class ShuffledOrder(Iterator[int]):
    """An endless order of ``size`` items, shuffled anew in each pass: a pure function of ``seed`` and position."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._position = 0
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    def __next__(self) -> int:
        epoch, offset = divmod(self._position, self._size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch))
            self._order, self._epoch = torch.randperm(self._size, generator=generator), epoch
        self._position += 1
        return int(self._order[offset])

    def state_dict(self) -> dict[str, Any]:
        """The number of items drawn so far, as JSON."""
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after as many items."""
        self._position = int(state["position"])


class MixedOrder(Iterator[int]):
    """Several orders in one, each with its share of the items: ``weights``, relative to each other.

    Every item comes from the order that is furthest behind its share, so that the shares are exact at any time, up to
    one item. Items are numbered order by order; ``sizes`` are the numbers of items.
    """

    def __init__(
        self, orders: Sequence[ShuffledOrder], sizes: Sequence[int], weights: Sequence[float]
    ) -> None:
        self._orders = orders
        self._first = [0, *accumulate(sizes)]
        self._shares = [weight / sum(weights) for weight in weights]
        self._drawn = [0] * len(orders)

    def __next__(self) -> int:
        due = sum(self._drawn) + 1
        behind = [share * due - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
        number = behind.index(max(behind))
        self._drawn[number] += 1
        return self._first[number] + next(self._orders[number])

    def state_dict(self) -> dict[str, Any]:
        """The positions of all orders, as JSON."""
        return {"drawn": list(self._drawn), "parts": [order.state_dict() for order in self._orders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        self._drawn = [int(drawn) for drawn in state["drawn"]]
        for order, position in zip(self._orders, state["parts"], strict=True):
            order.load_state_dict(position)


Order = ShuffledOrder | MixedOrder


# --------------------------------------------------------------------- samples


@dataclass(frozen=True, kw_only=True)
class SourceSamples:
    """The samples of one source."""

    origin: str
    """The name of the source, in messages."""
    format: str | None
    """The name of another system's format, where the examples have it."""
    digest: str | None
    """The digest of the rows of the Hub that these samples are from."""
    samples: Sequence[Sample]
    sizes: Sequence[Size]
    """The tokens of each sample."""
    rows: Sequence[int]
    """The row of each sample in the source, before others were dropped or held out."""
    left_out: int
    """Examples that cannot be trained and were left out."""

    def __len__(self) -> int:
        return len(self.samples)


class SampleDataset:
    """The samples of all ``parts`` in one numbering; drawn by ``weights``, or each as often as any other.

    The field ``index`` of a sample is its number, unless the example has a field of that name.
    """

    def __init__(self, parts: Sequence[SourceSamples], weights: Sequence[float] | None = None) -> None:
        self.parts = parts
        self._weights = weights if len(parts) > 1 else None
        self._ends = list(accumulate(map(len, parts)))
        sizes = [size for part in parts for size in part.sizes]
        self.longest = max(size.longest for size in sizes)
        """Tokens of the longest sequence."""
        self.largest_unit = max(size.largest_unit for size in sizes)
        """Tokens of the most that stays in one micro-batch: a sequence, or a pair."""
        self.most_sequences = max(len(size.units) for size in sizes)
        """The most sequences of a sample."""

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        source, number = self._place(index)
        return {"index": index, **self.parts[source].samples[number]}

    def order(self, seed: int) -> Order:
        """The endless order in which samples are drawn."""
        if self._weights is None:
            return ShuffledOrder(len(self), seed)
        orders = [
            ShuffledOrder(len(part), derive_seed(seed, number)) for number, part in enumerate(self.parts)
        ]
        return MixedOrder(orders, [len(part) for part in self.parts], self._weights)

    def size(self, index: int) -> Size:
        """The tokens of one sample."""
        source, number = self._place(index)
        return self.parts[source].sizes[number]

    def row_of(self, index: int) -> tuple[int, int]:
        """The number of the source of a sample, and of its row there, before others were dropped or held out."""
        source, number = self._place(index)
        return source, self.parts[source].rows[number]

    def index_of(self, source: int, row: int) -> int:
        """The sample of this row. Raises `ValueError` where no sample has it."""
        part = self.parts[source]
        return self._ends[source] - len(part) + part.rows.index(row)

    def _place(self, index: int) -> tuple[int, int]:
        """The number of the source, and the number of the sample in the source."""
        source = bisect_right(self._ends, index)
        return source, index - (self._ends[source - 1] if source else 0)


def encode_examples(
    examples: Examples,
    kind: ExampleKind,
    chat_format: ChatFormat,
    drop: bool = False,
    limit: int | None = None,
) -> SourceSamples:
    """``examples``, checked and encoded.

    A sequence has at most ``limit`` tokens. Unusable examples are one `BatchError` that names them (the first ten), or,
    with ``drop``, left out with a warning; `BatchError` where there is no other.
    """
    if not len(examples):
        raise BatchError(f"{examples.origin} has no {kind.noun}s; write one with {kind.needs} on each line")
    samples: dict[int, tuple[Sample, Size]] = {}
    problems: list[str] = []
    unused: dict[str, None] = {}
    places: dict[str, None] = {}
    for row in examples.rows:
        try:
            sample = _encoded(row, kind, chat_format, examples.origin)
            size = kind.size(sample)
        except BatchError as error:
            problems.append(str(error))
            continue
        if limit is not None and size.longest > limit:
            problems.append(
                f"{row.label} has {size.longest} tokens, longer than the {limit} tokens that the model's context "
                "leaves; shorten it, or lower rollout.max_new_tokens where there are rollouts"
            )
            continue
        samples[row.number] = sample, size
        images = bool(images_of(sample))
        unused |= dict.fromkeys(unused_columns(row.example, kind, chat_format, images))
        texts = () if images else all_texts([row.example.get(name) for name in (*CHATS, "text")])
        places |= dict.fromkeys(place for text in texts for place in PLACES.findall(text))
    if unused:
        logger.warning("%s: columns not used: %s", examples.origin, ", ".join(map(repr, unused)))
    if places:
        logger.warning("%s: trained as text, without an image: %s", examples.origin, ", ".join(places))
    _report(problems, examples, kind.noun, drop, bool(samples))
    return SourceSamples(
        origin=examples.origin,
        format=examples.format,
        digest=examples.digest,
        samples=[sample for sample, _ in samples.values()],
        sizes=[size for _, size in samples.values()],
        rows=list(samples),
        left_out=len(problems),
    )


def _encoded(row: Row, kind: ExampleKind, chat_format: ChatFormat, origin: str) -> Sample:
    """The sample of one row; `BatchError` with its label when it is damaged, `ConfigError` with its source."""
    example = row.read()
    if (problem := kind.check(example)) is not None:
        raise BatchError(f"{row.label} {problem}")
    try:
        return kind.encode(chat_format, example)
    except BatchError as error:
        raise BatchError(f"{row.label}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{origin}: {row.label}: {error}") from error


def _report(problems: list[str], examples: Examples, noun: str, drop: bool, others: bool) -> None:
    """Raise one `BatchError` for the ``problems``, or warn of them where they are dropped and there are ``others``."""
    if not problems:
        return
    if drop and others:
        more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        logger.warning(
            "%s: %d of %d %ss cannot be trained and are left out: %s%s",
            examples.origin,
            len(problems),
            len(examples),
            noun,
            "; ".join(problems[:NAMED]),
            more,
        )
        return
    if others:
        problems[0] += " (or leave out all rows that cannot be trained: data.unusable=drop)"
    raise_all(BatchError, examples.origin, problems, most=SHOWN)
