"""Delta weight sync: values that changed since the previous update, as a stream of tensors that any method carries.

A changed tensor comes whole under its name, or as two tensors where these are smaller: ``NAME#values`` with the new
values, and ``NAME#gaps`` with the number of unchanged elements before each of them. Unchanged tensors are left out.
Values replace values, so that nothing is rounded. ``#base`` is the digest of the weights before, which a full update
lacks, and ``#digest`` that of all weights after the update.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core_rl.errors import DeltaRefused

__all__ = ["DeltaBase", "DeltaDecoder", "DeltaEncoder", "DeltaWeights", "require_base"]

GAPS, VALUES, BASE, DIGEST = "#gaps", "#values", "#base", "#digest"
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by size: values are compared bit by bit, since NaN differs from itself and -0.0 equals 0.0."""
GAP_DTYPES = (torch.uint8, torch.int16, torch.int32)
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class DeltaBase:
    """Identity of the weights that changes are applied to."""

    version: int
    digest: str

    def __str__(self) -> str:
        return f"version {self.version} (digest {self.digest[:8]})"


class DeltaEncoder:
    """The sender: the weights of the previous update, and changes since then.

    The rank that sends has a copy of all exported tensors in host memory, in the dtype of the export: 2 bytes a
    parameter in bfloat16. Other ranks have none.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._digests: dict[str, bytes] = {}
        self.base: DeltaBase | None = None
        """The previous update, the same on all ranks but for its digest; None where the next update is full."""

    def forget(self) -> None:
        """Free the copy: the next update is full."""
        self._tensors, self._digests, self.base = {}, {}, None

    def encode(self, stream: Iterable[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor | None]]:
        """Changes of ``stream``, of full tensors, or None on ranks that do not send; then the digest.

        Until `commit` the next update would be full.
        """
        base, self.base = self.base, None
        changed = set()
        if base is None:
            self.forget()  # an update that failed has changed the copy
        else:
            yield BASE, _as_bytes(base.digest)
        for name, tensor in stream:
            if tensor is None:
                yield name, None
                continue
            for item in self._changes(name, tensor.detach().cpu()):
                changed.add(name)
                yield item
        if self._tensors:
            self._digests |= _digests({name: self._tensors[name] for name in changed})
            yield DIGEST, _as_bytes(_combined(self._digests))

    def recorded(self, stream: Iterable[tuple[str, Tensor | None]]) -> Iterator[tuple[str, Tensor | None]]:
        """The items of ``stream`` as they are, for a full update that `commit` makes the base."""
        self.forget()
        for name, tensor in stream:
            if tensor is not None:
                self._tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            yield name, tensor
        self._digests = _digests(self._tensors)

    def commit(self, version: int) -> None:
        """Make the weights that were encoded the base: the receiver has them as ``version``."""
        self.base = DeltaBase(version=version, digest=_combined(self._digests))

    def _changes(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        before = self._tensors.get(name)
        if before is None or (before.shape, before.dtype) != (tensor.shape, tensor.dtype):
            self._tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
            yield name, tensor
            return
        indices = _changed(_bits(tensor), _bits(before))
        if not indices.numel():
            return
        gaps, indices = _gaps(indices, tensor.element_size())
        values = tensor.reshape(-1)[indices]
        before.view(-1)[indices] = values
        if gaps.nbytes + values.nbytes < tensor.nbytes:
            yield name + GAPS, gaps
            yield name + VALUES, values
        else:
            yield name, tensor


@dataclass(frozen=True, kw_only=True)
class DeltaWeights:
    """Weights after an update, until `DeltaDecoder.commit`."""

    tensors: Mapping[str, Tensor]
    """All full tensors, on the CPU."""
    changed: frozenset[str]
    """Names of the tensors that the update changed."""
    digests: Mapping[str, bytes] = field(repr=False)


class DeltaDecoder:
    """The receiver: the weights of the previous update, to which changes are applied.

    It has a copy of all tensors in host memory, in the dtype in which they were sent: 2 bytes a parameter in bfloat16.
    During an update it has another copy of the changed tensors, so that a failed update changes nothing.
    """

    def __init__(self) -> None:
        self._tensors: Mapping[str, Tensor] = {}
        self._digests: Mapping[str, bytes] = {}
        self.base: DeltaBase | None = None
        """The present weights; None before the first update."""

    def forget(self) -> None:
        """Free the copy: the next update has to be full."""
        self._tensors, self._digests, self.base = {}, {}, None

    def decode(self, items: Iterable[tuple[str, Tensor]]) -> DeltaWeights:
        """All weights after the changes ``items``, whose memory it keeps; the present weights stay as they are.

        Raises `DeltaRefused` for changes since other weights, and where the result differs from the sender's weights.
        """
        sent = dict(items)
        base, digest = sent.pop(BASE, None), sent.pop(DIGEST, None)
        if base is not None:
            self.require(_as_text(base))
        before = {} if base is None else self._tensors
        changed = {}
        for name, tensor in sent.items():
            if (full := name.removesuffix(VALUES)) != name:
                changed[full] = self.replaced(full, before, sent.get(full + GAPS), tensor)
            elif not name.endswith(GAPS):
                changed[name] = tensor.contiguous()
        digests = {name: self._digests[name] for name in before} | _digests(changed)
        if base is not None or digest is not None:  # a model directory has none
            self.verify(digests, digest)
        return DeltaWeights(tensors={**before, **changed}, changed=frozenset(changed), digests=digests)

    def require(self, digest: str) -> None:
        """Raise `DeltaRefused` unless the present weights have this ``digest``."""
        if self.base is None or self.base.digest != digest:
            raise _refused(f"weights with the digest {digest[:8]}", self.base)

    @staticmethod
    def replaced(name: str, before: Mapping[str, Tensor], gaps: Tensor | None, values: Tensor) -> Tensor:
        """A copy of the tensor ``name`` of ``before`` with ``values`` [n] after ``gaps``; raises `DeltaRefused`."""
        old = before.get(name)
        if old is None or gaps is None or old.dtype != values.dtype:
            raise DeltaRefused(
                f"changes of {name!r} fit no tensor of the previous update; send a full update"
            )
        indices = _indices(gaps, values.numel())
        if indices.numel() and not 0 <= int(indices[0]) <= int(indices[-1]) < old.numel():
            raise DeltaRefused(
                f"changes of {name!r} lie outside of its {old.numel()} elements; send a full update"
            )
        new = old.clone()
        new.view(-1)[indices] = values
        return new

    @staticmethod
    def verify(digests: Mapping[str, bytes], sent: Tensor | None) -> None:
        """Raise `DeltaRefused` unless ``digests`` of all tensors make up the digest that was ``sent``."""
        if sent is None or _as_text(sent) != _combined(digests):
            raise DeltaRefused(
                "the weights after the changes differ from the sender's; a full update makes them the same"
            )

    def commit(self, weights: DeltaWeights, version: int) -> None:
        """Make ``weights``, which serve as ``version``, the present weights."""
        self._tensors, self._digests = weights.tensors, weights.digests
        self.base = DeltaBase(version=version, digest=_combined(weights.digests))


def require_base(sent: DeltaBase | None, present: DeltaBase | None) -> None:
    """Raise `DeltaRefused` for changes since ``sent`` where the receiver has ``present``."""
    if sent is not None and sent != present:
        raise _refused(str(sent), present)


def _refused(sent: str, present: DeltaBase | None) -> DeltaRefused:
    return DeltaRefused(
        f"the changes are since {sent}, and the receiver has {present or 'no weights of a delta update'}; send a full "
        "update (WeightUpdateMeta.rebase)"
    )


def _gaps(indices: Tensor, value_bytes: int) -> tuple[Tensor, Tensor]:
    """Unchanged elements before each of ``indices`` [n], ascending, as bytes of integers; and the indices [m] to send.

    Of the integers of 1, 2 and 4 bytes, those with the fewest bytes for gaps and values of ``value_bytes`` each: a gap
    that is too large is cut by unchanged elements, which are sent as well.
    """
    gaps = torch.diff(indices, prepend=indices.new_tensor([-1])) - 1

    def steps(dtype: torch.dtype) -> Tensor:
        return gaps // (torch.iinfo(dtype).max + 1)

    def cost(dtype: torch.dtype) -> int:
        return (len(gaps) + int(steps(dtype).sum())) * (dtype.itemsize + value_bytes)

    best = min(GAP_DTYPES, key=cost)
    counts, step = steps(best), torch.iinfo(best).max + 1
    if counts.any():
        before = (indices - gaps - 1).repeat_interleave(counts)
        numbers = torch.arange(len(before)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        places = torch.arange(len(indices)) + counts.cumsum(0)
        merged = torch.empty(len(indices) + len(before), dtype=torch.int64)
        inserted = torch.ones(len(merged), dtype=torch.bool)
        inserted[places] = False
        merged[places], merged[inserted] = indices, before + step * (numbers + 1)
        indices = merged
        gaps = torch.diff(indices, prepend=indices.new_tensor([-1])) - 1
    return gaps.to(best).view(torch.uint8), indices


def _indices(gaps: Tensor, count: int) -> Tensor:
    """The flat indices [count] int64 of `_gaps`."""
    if not count:
        return torch.empty(0, dtype=torch.int64)
    dtype = BITS[gaps.numel() // count]
    return gaps.view(dtype).long().add_(1).cumsum_(0).sub_(1)


def _changed(new: Tensor, old: Tensor) -> Tensor:
    """Ascending places [m] at which ``new`` and ``old`` [n] of integers differ.

    Words of 8 bytes are compared first: a search of all elements takes twice as long.
    """
    width = 8 // new.element_size()
    words = len(new) // width
    new_words, old_words = new[: words * width].view(words, width), old[: words * width].view(words, width)
    rows = (new_words.view(torch.int64) != old_words.view(torch.int64)).view(-1).nonzero().squeeze(1)
    places = (new_words[rows] != old_words[rows]).nonzero()
    rest = (new[words * width :] != old[words * width :]).nonzero().squeeze(1)
    return torch.cat([rows[places[:, 0]] * width + places[:, 1], rest + words * width])


def _bits(tensor: Tensor) -> Tensor:
    """The elements [n] as integers, at a place in memory that integers of 8 bytes may have."""
    flat = tensor.reshape(-1)
    flat = flat.clone() if flat.storage_offset() * flat.element_size() % 8 else flat
    return flat.view(BITS[tensor.element_size()])


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """SHA-256 of dtype, shape and values of each tensor."""

    def digest(tensor: Tensor) -> bytes:
        content = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        content.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return content.digest()

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(tensors, pool.map(digest, tensors.values()), strict=True))


def _as_bytes(digest: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)


def _as_text(digest: Tensor) -> str:
    return digest.numpy().tobytes().hex()


def _combined(digests: Mapping[str, bytes]) -> str:
    """One digest of all tensors, in the order of their names."""
    content = hashlib.sha256()
    for name in sorted(digests):
        content.update(name.encode() + b"\0" + digests[name])
    return content.hexdigest()
