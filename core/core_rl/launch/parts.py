"""The parts of a batch on their way to ranks. They are cut as bytes: as tensors, each field of each costs far more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from pickle import PickleBuffer
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.launch.out_of_band import bytes_of, tensor_of

__all__ = ["Part", "cut"]


def cut(batch: SequenceBatch, plan: Sequence[Sequence[int]]) -> list[Part]:
    """One part for each list of sequence indices, as `SequenceBatch.split`; each arrives as a batch on the CPU."""
    order = list(chain.from_iterable(plan))
    whole = order == list(range(batch.num_sequences))
    fields = _Fields.of(batch if whole else batch.select(order))
    ends = accumulate(map(len, plan), initial=0)
    return [Part(fields, first, last) for first, last in pairwise(ends)]


class Part:
    """The sequences ``first:last`` of a batch; where it is unpickled, a `SequenceBatch`."""

    def __init__(self, fields: _Fields, first: int, last: int) -> None:
        self._fields, self._first, self._last = fields, first, last

    def __reduce__(self) -> tuple[object, ...]:
        fields, first, last = self._fields, self._first, self._last
        start, end = fields.bounds[first], fields.bounds[last]
        return _arrived, (
            fields.input_ids.slice(start, end),
            fields.lengths.slice(first, last),
            {name: rows.slice(start, end) for name, rows in fields.tokens.items()},
            {name: rows.slice(first, last) for name, rows in fields.sequences.items()},
            {name: entries[first:last] for name, entries in fields.meta.items()},
            None if fields.unit is None else fields.unit.slice(first, last),
        )


def _arrived(
    input_ids: Tensor,
    lengths: Tensor,
    tokens: Mapping[str, Tensor],
    sequences: Mapping[str, Tensor],
    meta: Mapping[str, list[Any]],
    unit: Tensor | None,
) -> SequenceBatch:
    return SequenceBatch(
        input_ids=input_ids,
        cu_seqlens=F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        tokens=tokens,
        sequences=sequences,
        meta=meta,
        unit=unit,
    )


class _Slice:
    """Some rows of a tensor; where it is unpickled, a tensor."""

    def __init__(self, data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._data, self._dtype, self._shape = data, dtype, shape

    def __reduce__(self) -> tuple[object, ...]:
        return tensor_of, (PickleBuffer(self._data), self._dtype, self._shape)


class _Rows:
    """A tensor of which each part has consecutive rows."""

    def __init__(self, values: Tensor) -> None:
        self._data, self._dtype, self._row = bytes_of(values.detach().cpu()), values.dtype, values.shape[1:]
        self._row_bytes = math.prod(self._row) * values.element_size()

    def slice(self, first: int, last: int) -> _Slice:
        data = self._data[first * self._row_bytes : last * self._row_bytes]
        return _Slice(data, self._dtype, (last - first, *self._row))


@dataclass(frozen=True, kw_only=True)
class _Fields:
    """A batch whose sequences are in the order of the parts."""

    bounds: list[int]
    input_ids: _Rows
    lengths: _Rows
    tokens: Mapping[str, _Rows]
    sequences: Mapping[str, _Rows]
    meta: Mapping[str, list[Any]]
    unit: _Rows | None

    @classmethod
    def of(cls, batch: SequenceBatch) -> _Fields:
        return cls(
            bounds=batch.cu_seqlens.tolist(),
            input_ids=_Rows(batch.input_ids),
            lengths=_Rows(batch.cu_seqlens.diff()),
            tokens={name: _Rows(values) for name, values in batch.tokens.items()},
            sequences={name: _Rows(values) for name, values in batch.sequences.items()},
            meta=batch.meta,
            unit=None if batch.unit is None else _Rows(batch.unit),
        )
