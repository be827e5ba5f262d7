"""Messages between the driver and its ranks."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from core_rl.distributed.channel import Buffer
from core_rl.errors import CoreRLError, GroupError, RankFailed
from core_rl.launch.kept import Reference

__all__ = [
    "Failure",
    "pack_arguments",
    "pack_call",
    "pack_reference",
    "pack_reply",
    "unpack_call",
    "unpack_reply",
]


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
        """The exception to raise in the driver: the rank's own if it is one of ours, else `RankFailed`.

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


def pack_call(name: str, engine_id: int, fn: Callable[..., Any]) -> list[Buffer]:
    """What all ranks get of the call ``name``; raises `GroupError` if a part of it cannot be pickled."""
    return _sendable(name, (engine_id, fn))


def pack_arguments(name: str, args: tuple[Any, ...]) -> list[Buffer]:
    """What a rank gets after `pack_call`; raises as that."""
    return _sendable(name, args)


def _sendable(name: str, value: object) -> list[Buffer]:
    try:
        return _packed(value)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise GroupError(
            f"{name} or its arguments cannot be sent to the ranks: {error}. Use functions and "
            "classes of an importable module, not lambdas or local ones"
        ) from error


def pack_reference(reference: Reference) -> list[Buffer]:
    """Instead of a call that the rank finds in memory of its machine."""
    return _packed(reference)


def unpack_call(parts: Sequence[Buffer]) -> tuple[int, Callable[..., Any], tuple[Any, ...]]:
    """The engine id, the function and the arguments of a call; raises `GroupError` if they cannot be restored here."""
    rest = iter(parts)
    try:
        message = _unpacked(rest)
        if isinstance(message, Reference):
            rest = iter(message.open())
            message = _unpacked(rest)
        engine_id, fn = message
        args = _unpacked(rest)
    except GroupError:
        raise
    except Exception as error:
        raise GroupError(
            f"the function or its arguments cannot be restored in the rank: {error}. Define them in a module "
            "that the ranks can import, not in a notebook or on the command line"
        ) from error
    return engine_id, fn, args


def pack_reply(reply: object) -> list[Buffer]:
    """A reply as `packed`; a result that cannot be pickled becomes a `Failure`."""
    try:
        return _packed(reply)
    except Exception as error:  # noqa: BLE001 - `__reduce__` of a user's object may raise anything
        kind = type(reply).__name__
        refusal = GroupError(f"the result, a {kind}, cannot be sent to the driver: {error}")
        refusal.__cause__ = error
        return _packed(Failure.of(refusal))


def unpack_reply(parts: Sequence[Buffer]) -> Any:
    """The reply; a result that cannot be restored here becomes a `Failure`."""
    try:
        return _unpacked(parts)
    except Exception as error:  # noqa: BLE001 - `__setstate__` of a user's object may raise anything
        refusal = GroupError(f"the result of a rank cannot be restored in the driver: {error}")
        refusal.__cause__ = error
        return Failure.of(refusal)


def _packed(value: object) -> list[Buffer]:
    # Here, as it imports torch: this module does so only when there are ranks.
    from core_rl.launch.out_of_band import packed

    return packed(value)


def _unpacked(parts: Iterable[Buffer]) -> Any:
    from core_rl.launch.out_of_band import unpacked

    return unpacked(parts)


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
