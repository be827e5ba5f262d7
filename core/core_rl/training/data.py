"""Prompts from JSONL files, and the order in which they come."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from core_rl.errors import BatchError, raise_all
from core_rl.rollout.workflow import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "NUMBER",
    "NumberedBatches",
    "PromptDataset",
    "ShuffledOrder",
    "encode_prompt",
    "prompt_loader",
    "read_jsonl",
]

logger = logging.getLogger(__name__)

Sample = Mapping[str, Any]

NUMBER = "number"
"""The field of a sample that holds its place in the data order of the run."""
SHOWN = 10
"""Damaged lines that an error lists."""


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects in a JSONL file with a ``prompt`` each; empty lines are skipped.

    Raises `BatchError` with the file and the number of every damaged line (the first ten), or when
    there is nothing in it.
    """
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        row = _parse_line(line)
        if isinstance(row, str):
            problems.append(f"line {number} {row}")
        else:
            rows.append(row)
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    raise_all(BatchError, str(path), problems[:SHOWN] + more)
    if not rows:
        raise BatchError(f"{path} has no prompts; write one JSON object with a 'prompt' on each line")
    return rows


def _parse_line(line: bytes) -> dict[str, Any] | str:
    """The object in ``line``, or what is wrong with it."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"is not UTF-8: {error.reason} at byte {error.start}"
    except json.JSONDecodeError as error:
        return f"is not JSON: {error.msg} at column {error.colno}"
    if not isinstance(row, dict):
        return f"is a {type(row).__name__}; it must be an object with a 'prompt'"
    if not isinstance(row.get("prompt"), str) or not row["prompt"]:
        return f"needs a text 'prompt'; it has {row.get('prompt')!r}"
    return row


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of ``prompt``, ready to be continued.

    The beginning-of-sequence token stands once where the tokenizer puts it, even if the text spells
    it out as well, and no end-of-sequence token stands at the end.
    """
    ids: list[int] = tokenizer(prompt)["input_ids"]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    while len(ids) > 1 and bos is not None and ids[0] == ids[1] == bos:
        ids = ids[1:]
    while len(ids) > 1 and eos is not None and ids[-1] == eos:
        ids = ids[:-1]
    return ids


class PromptDataset(Dataset[Sample]):
    """The lines of a JSONL file, each with its ``prompt_ids``.

    ``limit`` is the most tokens of a prompt; longer ones are an error that names them, or, with ``drop``, left out.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None = None,
        drop: bool = False,
    ) -> None:
        rows = read_jsonl(path)
        samples = [row | {"prompt_ids": encode_prompt(tokenizer, row["prompt"])} for row in rows]
        empty = [n for n, sample in enumerate(samples) if not sample["prompt_ids"]]
        if empty:
            raise BatchError(f"{path}: prompt {empty[0] + 1} has no tokens; remove it or check the tokenizer")
        self._samples = _within(limit, samples, path, drop)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]


def _within(limit: int | None, samples: list[dict[str, Any]], path: Path, drop: bool) -> list[dict[str, Any]]:
    lengths = [len(sample["prompt_ids"]) for sample in samples]
    wrong = {n for n, length in enumerate(lengths) if limit is not None and length > limit}
    if not wrong:
        return samples
    text = (
        f"{path}: {len(wrong)} of {len(samples)} prompts are longer than the {limit} tokens "
        "that the model's context leaves"
    )
    if not drop or len(wrong) == len(samples):
        shown = ", ".join(f"prompt {n + 1} ({lengths[n]} tokens)" for n in sorted(wrong)[:3])
        raise BatchError(
            f"{text}: {shown}. Shorten them, lower rollout.max_new_tokens, or set data.too_long=drop"
        )
    logger.warning("%s; they are left out", text)
    return [sample for n, sample in enumerate(samples) if n not in wrong]


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
        """How many items have been drawn."""
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after as many items."""
        self._position = int(state["position"])


class _ShuffledSampler(Sampler[int]):
    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        return ShuffledOrder(self._size, self._seed)


def _as_list(samples: Sequence[Sample]) -> list[Sample]:
    return list(samples)


def prompt_loader(dataset: PromptDataset, batch_size: int, seed: int) -> StatefulDataLoader:
    """An endless loader of lists of ``batch_size`` samples. Its ``state_dict()`` is JSON.

    A pass over the data may end in the middle of a batch; the next one begins there.
    """
    sampler = _ShuffledSampler(len(dataset), seed)
    with warnings.catch_warnings():
        # torchdata 0.11 calls what newer torch deprecates; it goes when a torchdata without it is required.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=_as_list)


class NumberedBatches(Iterator[list[Sample]]):
    """The batches of a loader, each sample with its place in the data order; ``limit`` samples at most."""

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
        """Where the data order stands, as JSON."""
        return {
            "drawn": self._drawn,
            "loader": self._loader.state_dict() if self._batches is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; before the first batch is drawn."""
        assert self._batches is None
        self._drawn = int(state["drawn"])
        if state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])
