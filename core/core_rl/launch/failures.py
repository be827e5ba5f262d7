"""`Failure`: the error of a rank on its way to the driver."""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress
from dataclasses import dataclass

from core_rl.errors import CoreRLError, RankFailed


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
