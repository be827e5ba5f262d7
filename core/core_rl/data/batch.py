"""`SequenceBatch`: sequences laid end to end, with fields for each token and for each sequence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from core_rl.data.media import NO_MEDIA, Media, count_patches, media_violations
from core_rl.data.order import PrefixOrder, bounds_of, gather_sequences, token_index
from core_rl.data.pinned import to_device
from core_rl.errors import BatchError, raise_all

LOSS_MASK = "loss_mask"
"""The token field that marks the trained tokens (bool ``[T]``)."""


@dataclass(frozen=True, kw_only=True)
class SequenceBatch:
    """``B`` sequences packed into one token dimension of length ``T``, without padding.

    A value at position ``t`` belongs to token ``t``. The batch validates itself when it is built
    and raises one `BatchError` that names every wrong field and the sequence. Its methods validate
    added fields alone.
    """

    input_ids: Tensor
    """Token ids, int64 ``[T]``."""
    cu_seqlens: Tensor
    """Boundaries, int32 ``[B + 1]`` on the CPU: sequence ``b`` is ``cu_seqlens[b]:cu_seqlens[b + 1]``."""
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    """Token fields ``{name: [T, ...]}``."""
    sequences: Mapping[str, Tensor] = field(default_factory=dict)
    """Sequence fields ``{name: [B, ...]}``."""
    meta: Mapping[str, list[Any]] = field(default_factory=dict)
    """Sequence fields that are no tensors, one list entry for each sequence."""
    media: tuple[Media, ...] = ()
    """Images and videos of each sequence, or nothing where no sequence has some. They stay on the CPU."""
    unit: Tensor | None = None
    """Int64 ``[B]``: sequences with the same number are never separated (a preference pair, a group)."""
    # No fields, so that `dataclasses.replace` drops them.
    _original: ClassVar[SequenceBatch | None] = None
    """The batch on the CPU that `to` has copied: masks are computed there, without waiting for an accelerator."""
    _copied: ClassVar[Mapping[str, Tensor]] = {}
    """Masks and positions that were computed there and copied."""

    def __post_init__(self) -> None:
        raise_all(BatchError, "batch", self._violations())
        if self.cu_seqlens.dtype != torch.int32 or self.cu_seqlens.device.type != "cpu":
            object.__setattr__(self, "cu_seqlens", self.cu_seqlens.to("cpu", torch.int32))
        if self.input_ids.dtype != torch.long:
            object.__setattr__(self, "input_ids", self.input_ids.long())
        object.__setattr__(self, "tokens", _with_bool_mask(self.tokens))

    def _violations(self) -> Iterable[str]:
        if self.input_ids.dim() != 1 or self.input_ids.is_floating_point():
            yield f"'input_ids' must be integers [T]; got {_describe(self.input_ids)}"
            return
        if self.cu_seqlens.dim() != 1 or len(self.cu_seqlens) < 1 or self.cu_seqlens.is_floating_point():
            yield f"'cu_seqlens' must be integers [B + 1]; got {_describe(self.cu_seqlens)}"
            return
        bounds = self.cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != len(self.input_ids):
            yield f"'cu_seqlens' must run from 0 to T={len(self.input_ids)}; it runs from {bounds[0]} to {bounds[-1]}"
        empty = [b for b in range(len(bounds) - 1) if bounds[b + 1] <= bounds[b]]
        for b in empty[:3]:
            yield f"sequence {b} has length {bounds[b + 1] - bounds[b]}; every sequence needs at least one token"
        if len(self.input_ids) and int(self.input_ids.min()) < 0:
            t = int((self.input_ids < 0).nonzero()[0])
            owner = next((b for b in range(len(bounds) - 1) if bounds[b] <= t < bounds[b + 1]), -1)
            yield f"'input_ids' of sequence {owner} holds {int(self.input_ids[t])}; ids are not negative"
        count = len(bounds) - 1
        for name, entries in self.meta.items():
            if len(entries) != count:
                yield f"meta field {name!r} must have B={count} entries; it has {len(entries)}"
        yield from media_violations(self.media, count)
        if self.unit is not None and (self.unit.shape != (count,) or self.unit.is_floating_point()):
            yield f"'unit' must be integers [B={count}]; got {_describe(self.unit)}"
        yield from self._field_violations(self.tokens, self.sequences)

    def _field_violations(
        self, tokens: Mapping[str, Tensor], sequences: Mapping[str, Tensor]
    ) -> Iterable[str]:
        """Violations of these token and sequence fields as fields of this batch."""
        total, count = self.num_tokens, self.num_sequences
        for name, value in tokens.items():
            if value.dim() < 1 or len(value) != total:
                yield f"token field {name!r} must be [T={total}, ...]; got {_describe(value)}"
        for name, value in sequences.items():
            if value.dim() < 1 or len(value) != count:
                yield f"sequence field {name!r} must be [B={count}, ...]; got {_describe(value)}"
        for name in sorted(
            {*tokens} & {*self.sequences, *self.meta} | {*sequences} & {*self.tokens, *self.meta}
        ):
            yield f"{name!r} is a field of two kinds; rename one"

    # ---------------------------------------------------------------- reading

    @property
    def num_sequences(self) -> int:
        """``B``."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """``T``."""
        return len(self.input_ids)

    @property
    def lengths(self) -> list[int]:
        """The length of each sequence, ``B`` integers."""
        return self.cu_seqlens.diff().tolist()

    @property
    def computed_lengths(self) -> list[int]:
        """The tokens of each sequence, and the patches of its images."""
        if not self.media:
            return self.lengths
        return [tokens + count_patches(media) for tokens, media in zip(self.lengths, self.media, strict=True)]

    @property
    def max_length(self) -> int:
        """The longest sequence, 0 for an empty batch."""
        return max(self.lengths, default=0)

    @property
    def device(self) -> torch.device:
        """The device of the token ids."""
        return self.input_ids.device

    @property
    def loss_mask(self) -> Tensor:
        """The mask of trained tokens, bool ``[T]``; the first token of a sequence is never trained.

        Without a ``loss_mask`` field, all but the first tokens are.
        """
        return self._following("loss_mask", _loss_mask)

    @property
    def not_first(self) -> Tensor:
        """Bool ``[T]``: all but the first token of each sequence."""
        return self._following("not_first", _not_first)

    @property
    def position_ids(self) -> Tensor:
        """Positions that start again at 0 in each sequence, int64 ``[T]``."""
        return self._following("position_ids", _position_ids)

    @property
    def original(self) -> SequenceBatch:
        """The batch on the CPU that this one is a copy of by `to`, or itself."""
        return self._original or self

    @cached_property
    def prefix_order(self) -> PrefixOrder:
        """The sequences by prefixes that they share: equal ids with equal replayed experts.

        Sorted once: copies with the same ids and experts have the same order.
        """
        if self._original is not None:
            return self._original.prefix_order
        routing, keys = self.tokens.get("routing"), self.input_ids[:, None]
        if routing is not None:
            keys = torch.cat([keys, routing.flatten(1).long()], dim=1)
        rows = keys.cpu().numpy()
        return PrefixOrder.of([rows[first:end] for first, end in pairwise(self.cu_seqlens.tolist())])

    def predicted(self, *, trained_only: bool) -> Tensor:
        """Positions where `not_first`, or with ``trained_only`` `loss_mask`, is true: int64 ``[N]``, on the CPU."""
        batch = self.original
        mask = batch.loss_mask if trained_only else batch.not_first
        return mask.nonzero().squeeze(1).cpu()

    def _following(self, name: str, compute: Callable[[SequenceBatch], Tensor]) -> Tensor:
        """``compute`` of this batch; of a copy by `to`, computed once on the CPU and copied."""
        if self._original is None:
            return compute(self)
        if name not in self._copied:
            copied = {**self._copied, name: to_device(compute(self._original), self.device)}
            object.__setattr__(self, "_copied", copied)
        return self._copied[name]

    def __getitem__(self, name: str) -> Tensor:
        """The token or sequence field ``name``; a `BatchError` lists the fields there are."""
        for fields in (self.tokens, self.sequences):
            if name in fields:
                return fields[name]
        known = sorted([*self.tokens, *self.sequences])
        raise BatchError(f"the batch has no field {name!r}; it has {known}")

    def __contains__(self, name: str) -> bool:
        return name in self.tokens or name in self.sequences

    # --------------------------------------------------------------- changing

    def with_tokens(self, **fields: Tensor) -> SequenceBatch:
        """A copy with these token fields ``[T, ...]`` added or replaced."""
        raise_all(BatchError, "batch", self._field_violations(fields, {}))
        return self._derived(tokens=_with_bool_mask({**self.tokens, **fields}))

    def with_sequences(self, **fields: Tensor) -> SequenceBatch:
        """A copy with these sequence fields ``[B, ...]`` added or replaced."""
        raise_all(BatchError, "batch", self._field_violations({}, fields))
        return self._derived(sequences={**self.sequences, **fields})

    def only(self, names: Collection[str]) -> SequenceBatch:
        """A copy with the fields ``names`` alone, ``media`` and ``unit``."""
        return self._derived(
            tokens={name: value for name, value in self.tokens.items() if name in names},
            sequences={name: value for name, value in self.sequences.items() if name in names},
            meta={name: entries for name, entries in self.meta.items() if name in names},
        )

    def to(self, device: torch.device | str) -> SequenceBatch:
        """The batch on ``device``; ``cu_seqlens`` and ``unit`` stay on the CPU."""
        device = torch.device(device)
        if device == self.device:
            return self
        return self._derived(
            input_ids=to_device(self.input_ids, device),
            tokens={name: to_device(value, device) for name, value in self.tokens.items()},
            sequences={name: to_device(value, device) for name, value in self.sequences.items()},
            _original=self if self.device.type == "cpu" else None,
        )

    def select(self, indices: Sequence[int]) -> SequenceBatch:
        """The sequences ``indices``, in that order; `BatchError` names an index that is out of range."""
        count = self.num_sequences
        wrong = [i for i in indices if not 0 <= i < count]
        if wrong:
            raise BatchError(f"cannot select sequence {wrong[0]} of a batch with {count}")
        rows = torch.tensor(list(indices), dtype=torch.long)
        input_ids, *tokens = gather_sequences([self.input_ids, *self.tokens.values()], self.cu_seqlens, rows)
        return self._derived(
            input_ids=input_ids,
            cu_seqlens=bounds_of(self.cu_seqlens[rows + 1] - self.cu_seqlens[rows]),
            tokens=dict(zip(self.tokens, tokens, strict=True)),
            sequences={
                name: value.index_select(0, rows.to(value.device)) for name, value in self.sequences.items()
            },
            meta={name: [entries[i] for i in indices] for name, entries in self.meta.items()},
            media=tuple(self.media[i] for i in indices) if self.media else (),
            unit=None if self.unit is None else self.unit[rows],
        )

    def token_index(self, indices: Sequence[int]) -> Tensor:
        """Positions in the token dimension of the sequences ``indices``, int64, on the CPU."""
        return token_index(self.cu_seqlens, torch.tensor(list(indices), dtype=torch.long))

    def split(self, parts: Sequence[Sequence[int]]) -> list[SequenceBatch]:
        """One batch for each list of sequence indices. Their tensors are slices of one copy: gathering costs more for
        each tensor than for each token where parts are many.
        """
        joined = self.select([index for part in parts for index in part])
        counts = [len(part) for part in parts]
        ends = list(accumulate(counts, initial=0))
        bounds = [joined.cu_seqlens[first : last + 1] for first, last in pairwise(ends)]
        sizes = [int(part[-1] - part[0]) for part in bounds]
        units = [None] * len(parts) if joined.unit is None else joined.unit.split(counts)
        return [
            self._derived(
                input_ids=ids,
                cu_seqlens=part - part[0],
                tokens=tokens,
                sequences=sequences,
                meta={name: entries[first:last] for name, entries in joined.meta.items()},
                media=joined.media[first:last],
                unit=unit,
            )
            for ids, part, tokens, sequences, (first, last), unit in zip(
                joined.input_ids.split(sizes),
                bounds,
                _slices(joined.tokens, sizes),
                _slices(joined.sequences, counts),
                pairwise(ends),
                units,
                strict=True,
            )
        ]

    def _derived(self, **fields: Any) -> SequenceBatch:
        """A copy with these fields, which are known to be valid: `dataclasses.replace` would validate all again."""
        derived = copy(self)
        for name, value in {"_original": None, "_copied": {}, **fields}.items():
            object.__setattr__(derived, name, value)
        same_routing = derived.tokens.get("routing") is self.tokens.get("routing")
        if derived.input_ids is not self.input_ids or not same_routing:
            vars(derived).pop("prefix_order", None)
        return derived

    # --------------------------------------------------------------- building

    @staticmethod
    def from_sequences(
        input_ids: Sequence[Sequence[int] | Tensor],
        *,
        tokens: Mapping[str, Sequence[Sequence[float] | Tensor]] | None = None,
        sequences: Mapping[str, Tensor] | None = None,
        meta: Mapping[str, list[Any]] | None = None,
        media: Sequence[Media] = (),
        unit: Tensor | None = None,
    ) -> SequenceBatch:
        """Pack lists of ids, and token fields given as one list for each sequence."""
        rows = [torch.as_tensor(row, dtype=torch.long) for row in input_ids]
        fields = {name: [torch.as_tensor(row) for row in values] for name, values in (tokens or {}).items()}
        raise_all(BatchError, "from_sequences", _ragged_violations(rows, fields))
        return SequenceBatch(
            input_ids=torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long),
            cu_seqlens=bounds_of(torch.tensor([len(row) for row in rows], dtype=torch.int32)),
            tokens={name: torch.cat(values) if values else torch.zeros(0) for name, values in fields.items()},
            sequences=dict(sequences or {}),
            meta=dict(meta or {}),
            media=tuple(media),
            unit=unit,
        )

    @staticmethod
    def concat(batches: Sequence[SequenceBatch]) -> SequenceBatch:
        """The sequences of all ``batches`` in order. All must have the same fields.

        Unit numbers of different batches are kept apart.
        """
        if not batches:
            raise BatchError("cannot concatenate no batches; pass at least one")
        raise_all(BatchError, "concat", _field_mismatches(batches))
        units, shift = [], 0
        for batch in batches:
            if batch.unit is not None:
                _, dense = torch.unique(batch.unit, return_inverse=True)
                units.append(dense + shift)
                shift += int(dense.max()) + 1 if len(dense) else 0
        first = batches[0]
        return SequenceBatch(
            input_ids=torch.cat([b.input_ids for b in batches]),
            cu_seqlens=bounds_of(torch.cat([b.cu_seqlens.diff() for b in batches])),
            tokens={name: torch.cat([b.tokens[name] for b in batches]) for name in first.tokens},
            sequences={name: torch.cat([b.sequences[name] for b in batches]) for name in first.sequences},
            meta={name: [entry for b in batches for entry in b.meta[name]] for name in first.meta},
            media=_joined_media(batches),
            unit=torch.cat(units) if first.unit is not None else None,
        )

    def dummy(self) -> SequenceBatch:
        """One untrained token with the fields of this batch, all zero: work for a rank that has none."""

        def zeros(value: Tensor) -> Tensor:
            return value.new_zeros((1, *value.shape[1:]))

        return SequenceBatch(
            input_ids=self.input_ids.new_zeros(1),
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
            tokens={**{name: zeros(value) for name, value in self.tokens.items()},
                    LOSS_MASK: torch.zeros(1, dtype=torch.bool, device=self.device)},
            sequences={name: zeros(value) for name, value in self.sequences.items()},
            meta={name: [None] for name in self.meta},
            unit=None if self.unit is None else torch.zeros(1, dtype=torch.long),
        )  # fmt: skip


def _joined_media(batches: Sequence[SequenceBatch]) -> tuple[Media, ...]:
    if not any(batch.media for batch in batches):
        return ()
    return tuple(media for batch in batches for media in batch.media or (NO_MEDIA,) * batch.num_sequences)


def _loss_mask(batch: SequenceBatch) -> Tensor:
    mask = batch.tokens.get(LOSS_MASK)
    return batch.not_first if mask is None else batch.not_first & mask


def _not_first(batch: SequenceBatch) -> Tensor:
    mask = torch.ones_like(batch.input_ids, dtype=torch.bool)
    mask[batch.cu_seqlens[:-1].to(mask.device, torch.long)] = False
    return mask


def _position_ids(batch: SequenceBatch) -> Tensor:
    starts = batch.cu_seqlens[:-1].long()
    shifts = torch.repeat_interleave(starts, batch.cu_seqlens.diff(), output_size=batch.num_tokens)
    return torch.arange(batch.num_tokens, device=batch.device) - to_device(shifts, batch.device)


def _slices(fields: Mapping[str, Tensor], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    sliced = {name: value.split(list(sizes)) for name, value in fields.items()}
    return [{name: parts[number] for name, parts in sliced.items()} for number in range(len(sizes))]


def _with_bool_mask(tokens: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    mask = tokens.get(LOSS_MASK)
    return tokens if mask is None or mask.dtype == torch.bool else {**tokens, LOSS_MASK: mask.bool()}


def _describe(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _ragged_violations(rows: list[Tensor], fields: Mapping[str, list[Tensor]]) -> Iterable[str]:
    for name, values in fields.items():
        if len(values) != len(rows):
            yield f"token field {name!r} has {len(values)} sequences; 'input_ids' has {len(rows)}"
            continue
        for b, (row, value) in enumerate(zip(rows, values, strict=True)):
            if len(value) != len(row):
                yield f"token field {name!r} of sequence {b} has {len(value)} values for {len(row)} tokens"


def _field_mismatches(batches: Sequence[SequenceBatch]) -> Iterable[str]:
    def fields(batch: SequenceBatch) -> set[str]:
        unit = {"unit"} if batch.unit is not None else set()
        return {*batch.tokens, *batch.sequences, *batch.meta} | unit

    for index, batch in enumerate(batches[1:], start=1):
        different = sorted(fields(batch) ^ fields(batches[0]))
        if different:
            yield f"batch {index} and batch 0 differ in the fields {different}"
