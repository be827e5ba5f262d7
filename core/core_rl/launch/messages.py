"""Messages between the driver and its ranks: a `Call`, its reply or `Failure`, and the tensors in both.

Pickle's protocol 5 (PEP 574) leaves buffers out of its stream, so that tensors are sent and received without a copy;
torch's way to pickle a tensor copies it, into the stream and out of it, and takes the whole storage behind a view.
"""

from __future__ import annotations

import io
import math
import pickle
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.distributed.channel import Buffer
from core_rl.errors import CoreRLError, GroupError, RankFailed
from core_rl.launch.kept import Reference

SMALLEST_BYTES = 4096
"""Smaller buffers go into the stream."""


@dataclass(frozen=True)
class Call:
    """A call of ``method`` on every rank: of its engine, or of `core_rl.launch.remote.RankState`."""

    engine_id: int
    method: str
    arguments: tuple[Any, ...] = ()
    """The same for all ranks; a rank's own arguments come before them."""

    @property
    def name(self) -> str:
        """The call in messages: the method, or the function that it runs."""
        if self.method in NAMES:
            return NAMES[self.method]
        if self.method not in FUNCTION_CALLS:
            return self.method
        fn = self.arguments[0]
        return getattr(fn, "__qualname__", None) or repr(fn)

    @property
    def is_collective(self) -> bool:
        """Whether a rank may wait for another one in it."""
        return self.method != "prepare"


NAMES = {"prepare": "the check of the config", "open_store": "opening the store of the ranks"}
FUNCTION_CALLS = ("run", "run_alone")


def pack_sent(name: str, value: Call | tuple[Any, ...]) -> list[Buffer]:
    """A call ``name`` for all ranks, or next a rank's own arguments; raises `GroupError` where pickle cannot."""
    try:
        return packed(value)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise GroupError(
            f"{name} or its arguments cannot be sent to the ranks: {error}. Use functions and "
            "classes of an importable module, not lambdas or local ones"
        ) from error


def unpack_call(parts: Sequence[Buffer]) -> tuple[Call, tuple[Any, ...]]:
    """A call and this rank's own arguments; raises `GroupError` if they cannot be restored here."""
    rest = iter(parts)
    try:
        call = unpacked(rest)
        if isinstance(call, Reference):  # the rank finds the call in memory of its machine
            rest = iter(call.open())
            call = unpacked(rest)
        return call, unpacked(rest)
    except GroupError:
        raise
    except Exception as error:
        raise GroupError(
            f"the function or its arguments cannot be restored in the rank: {error}. Define them in a module "
            "that the ranks can import, not in a notebook or on the command line"
        ) from error


def pack_reply(reply: object) -> list[Buffer]:
    """A reply as `packed`; a result that cannot be pickled becomes a `Failure`."""
    try:
        return packed(reply)
    except Exception as error:  # noqa: BLE001 - `__reduce__` of a user's object may raise anything
        kind = type(reply).__name__
        refusal = GroupError(f"the result, a {kind}, cannot be sent to the driver: {error}")
        refusal.__cause__ = error
        return packed(Failure.of(refusal))


def unpack_reply(parts: Sequence[Buffer]) -> Any:
    """The reply; a result that cannot be restored here becomes a `Failure`."""
    try:
        return unpacked(parts)
    except Exception as error:  # noqa: BLE001 - `__setstate__` of a user's object may raise anything
        refusal = GroupError(f"the result of a rank cannot be restored in the driver: {error}")
        refusal.__cause__ = error
        return Failure.of(refusal)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The reply to a call that raised; the reply to any other call is its result."""

    summary: str
    """The error in one line or a few, as Python prints it."""
    traceback: str
    error: bytes | None
    """The pickled exception, where it can be restored."""

    @staticmethod
    def of(error: BaseException) -> Failure:
        """The record of ``error``."""
        return Failure(
            summary="".join(traceback.format_exception_only(error)).strip(),
            traceback="".join(traceback.format_exception(error)),
            error=_pack_error(error),
        )

    def to_error(self, rank: int, world_size: int, place: str = "") -> CoreRLError:
        """The exception to raise in the driver: the rank's own `CoreRLError`, else `RankFailed`.

        ``place`` is a phrase about the rank's machine.
        """
        name = f"rank {rank} of {world_size}{place}"
        failed = RankFailed(f"{name} failed: {self.summary}", rank, self.traceback)
        original = _unpack_error(self.error)
        if not isinstance(original, CoreRLError):
            failed.__cause__ = original
            return failed
        original.add_note(f"Raised on {name}. The rank's traceback:\n{self.traceback}")
        original.__cause__ = failed
        return original


def _pack_error(error: BaseException) -> bytes | None:
    with suppress(Exception):  # `__reduce__` of a user's exception may raise anything
        return pickle.dumps(error, protocol=pickle.HIGHEST_PROTOCOL)
    return None


def _unpack_error(payload: bytes | None) -> BaseException | None:
    """The exception, or None: many exceptions pickle and then fail to be restored."""
    with suppress(Exception):  # the constructor of a user's exception may raise anything
        error = None if payload is None else pickle.loads(payload)  # noqa: S301 - our own rank sent it
        return error if isinstance(error, BaseException) else None
    return None


# --------------------------------------------------------------------- pickles with buffers


def packed(value: object) -> list[Buffer]:
    """The pickle of ``value``, and the buffers that it refers to: they are to be sent before the tensors change.

    Raises `pickle`'s errors for unsupported objects.
    """
    buffers: list[Buffer] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < SMALLEST_BYTES:
            return True  # in the stream
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=keep).dump(value)
    return [memoryview(stream.getvalue()), *buffers]  # `getbuffer` in a cycle crashes the collector of 3.12.1


def unpacked(parts: Iterable[Buffer]) -> Any:
    """The object of `packed`. Its tensors lie in the memory of ``parts``, which is theirs.

    Of an iterator it takes what belongs to this object, so that several may follow each other.
    """
    buffers = iter(parts)
    return pickle.loads(next(buffers), buffers=buffers)  # noqa: S301 - from a process of the same run


class _Pickler(pickle.Pickler):
    """Plain tensors on the CPU are a buffer with a dtype and a shape; others are pickled as torch does it."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        return tensor_of, (pickle.PickleBuffer(bytes_of(value)), value.dtype, tuple(value.shape))


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not vars(tensor)
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a plain tensor on the CPU, or of a copy that is contiguous."""
    data: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def tensor_of(data: Buffer, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor whose `bytes_of` are ``data``, in the same memory."""
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


# --------------------------------------------------------------------- parts of a batch


def cut(batch: SequenceBatch, plan: Sequence[Sequence[int]]) -> list[SequenceBatch]:
    """One batch on the CPU for each list of sequence indices; a single list of all in order copies nothing."""
    local = batch.to("cpu")
    is_whole = len(plan) == 1 and list(plan[0]) == list(range(batch.num_sequences))
    return [local] if is_whole else local.split(plan)
