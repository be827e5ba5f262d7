"""Encoded training data, and the order in which it comes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from core_rl.data.batch import SequenceBatch
from core_rl.errors import BatchError, ConfigError
from core_rl.seeds import derive_seed
from core_rl_trainer.algorithms.fields import CHOSEN
from core_rl_trainer.data.encoding import encode_completion, encode_demonstration, encode_prompt
from core_rl_trainer.data.examples import (
    Example,
    ExampleCheck,
    check_demonstration,
    check_preference,
    check_prompt,
    read_examples,
    read_jsonl,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "NUMBER",
    "DemonstrationDataset",
    "ExampleDataset",
    "MakeBatch",
    "NumberedBatches",
    "PreferenceDataset",
    "PromptDataset",
    "ShuffledOrder",
    "demonstration_batch",
    "encode_prompt",
    "preference_batch",
    "prompt_loader",
    "read_jsonl",
]

logger = logging.getLogger(__name__)

Sample = Mapping[str, Any]
MakeBatch = Callable[[Sequence[Sample]], SequenceBatch]

NUMBER = "_number"
"""The field of a sample that holds its position in the data order of the run."""


class ExampleDataset(Dataset[Sample]):
    """Examples of training data, each with what was encoded of it.

    A sample's ``index`` is its place among them, unless its example has a field of that name.

    ``lengths`` are their tokens, and ``limit`` the most of them; longer ones are an error that names them, or, with
    ``drop``, left out.
    """

    def __init__(
        self, path: Path, samples: Sequence[Sample], lengths: Sequence[int], limit: int | None, drop: bool
    ) -> None:
        kept = within_limit(path, samples, lengths, limit, drop)
        self._samples = [{"index": index, **samples[number]} for index, number in enumerate(kept)]
        self.longest = max(lengths[number] for number in kept)
        """Tokens of the longest of them."""
        self.largest_unit = self.longest
        """Tokens of the most that stays in one micro-batch: a sequence, or a pair."""

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]


class PromptDataset(ExampleDataset):
    """Prompts, each with its ``prompt_ids``."""

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None = None,
        drop: bool = False,
    ) -> None:
        def encode(example: Example) -> Sample:
            return example | {"prompt_ids": encode_prompt(tokenizer, example["prompt"])}

        samples = encode_examples(path, check_prompt, encode)
        empty = [n for n, sample in enumerate(samples) if not sample["prompt_ids"]]
        if empty:
            raise BatchError(f"{path}: prompt {empty[0] + 1} has no tokens; remove it or check the tokenizer")
        super().__init__(path, samples, [len(sample["prompt_ids"]) for sample in samples], limit, drop)


class DemonstrationDataset(ExampleDataset):
    """Sequences to imitate: ``input_ids`` and ``loss_mask``."""

    def __init__(
        self, path: Path, tokenizer: PreTrainedTokenizerBase, limit: int | None = None, drop: bool = False
    ) -> None:
        def encode(example: Example) -> Sample:
            ids, mask = encode_demonstration(tokenizer, example)
            return {"input_ids": ids, "loss_mask": mask}

        samples = encode_examples(path, check_demonstration, encode)
        super().__init__(path, samples, [len(sample["input_ids"]) for sample in samples], limit, drop)


class PreferenceDataset(ExampleDataset):
    """Pairs: ``chosen`` and ``rejected``, each token ids and mask."""

    def __init__(
        self, path: Path, tokenizer: PreTrainedTokenizerBase, limit: int | None = None, drop: bool = False
    ) -> None:
        def encode(example: Example) -> Sample:
            return {
                name: encode_completion(tokenizer, example["prompt"], example[name])
                for name in ("chosen", "rejected")
            }

        samples = encode_examples(path, check_preference, encode)
        lengths = [max(len(ids) for ids, _ in sample.values()) for sample in samples]
        super().__init__(path, samples, lengths, limit, drop)
        self.largest_unit = max(
            len(sample["chosen"][0]) + len(sample["rejected"][0]) for sample in self._samples
        )


def encode_examples(path: Path, check: ExampleCheck, encode: Callable[[Example], Sample]) -> list[Sample]:
    """Samples that ``encode`` makes of each example at ``path``. Raises an error that names the example."""
    samples = []
    for number, example in enumerate(read_examples(path, check), start=1):
        try:
            samples.append(encode(example))
        except (BatchError, ConfigError) as error:
            raise type(error)(f"{path}: example {number}: {error}") from error
    return samples


def within_limit(
    path: Path, samples: Sequence[Sample], lengths: Sequence[int], limit: int | None, drop: bool
) -> list[int]:
    """The numbers of the samples of at most ``limit`` tokens; see `ExampleDataset`."""
    wrong = [n for n, length in enumerate(lengths) if limit is not None and length > limit]
    if not wrong:
        return list(range(len(samples)))
    kind = "prompt" if "prompt_ids" in samples[0] else "example"
    text = f"{len(wrong)} of {len(samples)} {kind}s are longer than the {limit} tokens that the model's context leaves"
    if not drop or len(wrong) == len(samples):
        shown = ", ".join(f"{kind} {n + 1} ({lengths[n]} tokens)" for n in wrong[:3])
        raise BatchError(
            f"{path}: {text}: {shown}. Shorten them, lower rollout.max_new_tokens where there are rollouts, or set "
            "data.too_long=drop"
        )
    logger.warning("%s: %s; they are left out", path, text)
    longer = set(wrong)
    return [n for n in range(len(samples)) if n not in longer]


class ShuffledOrder(Iterator[int]):
    """An endless order of ``size`` items, shuffled anew in each pass; a pure function of seed and position."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._position = 0
        self._epoch = -1
        self._order: list[int] = []

    def __next__(self) -> int:
        epoch, offset = divmod(self._position, self._size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch))
            self._order, self._epoch = torch.randperm(self._size, generator=generator).tolist(), epoch
        self._position += 1
        return self._order[offset]

    def state_dict(self) -> dict[str, int]:
        """The number of items drawn so far."""
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after as many items."""
        self._position = int(state["position"])


class _ShuffledSampler(Sampler[int]):
    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        return ShuffledOrder(self._size, self._seed)


def prompt_loader(dataset: ExampleDataset, batch_size: int, seed: int) -> StatefulDataLoader:
    """An endless loader of lists of ``batch_size`` samples. Its ``state_dict()`` is JSON.

    A pass over the data may end in the middle of a batch; the next one begins there.
    """
    sampler = _ShuffledSampler(len(dataset), seed)
    with warnings.catch_warnings():
        # torchdata 0.11 calls what newer torch deprecates; it goes when a torchdata without it is required.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=list)


class NumberedBatches(Iterator[list[Sample]]):
    """The batches of a loader, each sample with its position in the data order; ``limit`` samples at most."""

    def __init__(self, loader: StatefulDataLoader, limit: int | None = None) -> None:
        self._loader = loader
        self._limit = limit
        self._batches: Iterator[list[Sample]] | None = None
        self._drawn = 0

    def __next__(self) -> list[Sample]:
        if self._limit is not None and self._drawn >= self._limit:
            raise StopIteration
        if self._batches is None:
            self._batches = iter(self._loader)
        samples = next(self._batches)
        first, self._drawn = self._drawn, self._drawn + len(samples)
        return [{**sample, NUMBER: number} for number, sample in enumerate(samples, first)]

    def state_dict(self) -> dict[str, Any]:
        """The position in the data order, as JSON."""
        return {
            "drawn": self._drawn,
            "loader": self._loader.state_dict() if self._batches is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from there; before the first batch is drawn."""
        assert self._batches is None
        self._drawn = int(state["drawn"])
        if state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])


def demonstration_batch(samples: Sequence[Sample]) -> SequenceBatch:
    """One sequence for each sample, with ``loss_mask [T]``."""
    return _packed([(sample["input_ids"], sample["loss_mask"]) for sample in samples])


def preference_batch(samples: Sequence[Sample]) -> SequenceBatch:
    """Two sequences for each sample, the preferred one first, as a unit; ``loss_mask [T]`` and ``chosen [B]``."""
    sequences = [sample[name] for sample in samples for name in ("chosen", "rejected")]
    batch = _packed(sequences, unit=torch.arange(len(samples)).repeat_interleave(2))
    return batch.with_sequences(**{CHOSEN: torch.tensor([True, False]).repeat(len(samples))})


def _packed(sequences: Sequence[tuple[list[int], list[bool]]], unit: Tensor | None = None) -> SequenceBatch:
    return SequenceBatch.from_sequences(
        [ids for ids, _ in sequences], tokens={"loss_mask": [mask for _, mask in sequences]}, unit=unit
    )
