"""Steps that all ranks take together, so that a failure of one is an error of all and never a hang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from safetensors import SafetensorError

from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointError, CoreRLError, raise_all

__all__ = ["agree", "describe", "on_all", "on_leader"]

T = TypeVar("T")


def agree(comm: Comm, compute: Callable[[], T]) -> list[T]:
    """``compute()`` of every rank, in rank order.

    When it raises a `CoreRLError` on some rank, every rank raises one, so that none waits for
    another that has given up.
    """
    failure: CoreRLError | None = None
    value: T | None = None
    try:
        value = compute()
    except CoreRLError as error:
        failure = error
    answers = comm.gather((value, None if failure is None else (type(failure), str(failure))))
    if failure is not None:
        raise failure
    for rank, (_, problem) in enumerate(answers):
        if problem is not None:
            kind, message = problem
            raise kind(f"on data-parallel rank {rank}: {message}")
    return [cast("T", answer) for answer, _ in answers]


def describe(error: Exception) -> str:
    """What went wrong in one line, with the file's name where the error knows it."""
    if isinstance(error, OSError) and error.strerror:
        name = f"{Path(str(error.filename)).name}: " if error.filename else ""
        return name + error.strerror
    if isinstance(error, CoreRLError | SafetensorError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def on_all(comm: Comm, action: Callable[[], T], subject: str, kind: type[CoreRLError] | None = None) -> T:
    """``action()`` on every rank; returns this rank's own result.

    When it fails anywhere, every rank raises one error that lists the ranks and their reasons: of
    ``kind``, or by default of the first failure's own kind if that is one of ours, and else a
    `CheckpointError`. On a rank that failed, the original is chained.
    """
    result, cause = _attempt(action)
    answers = comm.gather(None if cause is None else (_kind_of(cause), describe(cause)))
    kinds = [answer[0] for answer in answers if answer is not None]
    if kinds:
        _raise(kind or kinds[0], subject, _by_rank(answers), cause)
    assert not isinstance(result, _Nothing)
    return result


def on_leader(comm: Comm, action: Callable[[], T], subject: str, kind: type[CoreRLError] | None = None) -> T:
    """``action()`` on rank 0 alone; every rank returns its result or raises its error, as `on_all` does."""
    result, cause = _attempt(action) if comm.rank == 0 else (_Nothing(), None)
    failure = None if cause is None else (_kind_of(cause), describe(cause))
    result, failure = comm.broadcast((result, failure))
    if failure is not None:
        _raise(kind or failure[0], subject, [failure[1]], cause)
    assert not isinstance(result, _Nothing)
    return result


def _by_rank(answers: list[tuple[type[CoreRLError], str] | None]) -> list[str]:
    """Each reason once, after the ranks that gave it."""
    ranks: dict[str, list[str]] = {}
    for rank, answer in enumerate(answers):
        if answer is not None:
            ranks.setdefault(answer[1], []).append(str(rank))
    return [f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {reason}" for reason, who in ranks.items()]


class _Nothing:
    """The result of an action that failed or did not run."""


def _attempt(action: Callable[[], T]) -> tuple[T | _Nothing, Exception | None]:
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks wait for this one
        return _Nothing(), error


def _kind_of(error: Exception) -> type[CoreRLError]:
    return type(error) if isinstance(error, CoreRLError) else CheckpointError


def _raise(kind: type[CoreRLError], subject: str, reasons: list[str], cause: Exception | None) -> None:
    try:
        raise_all(kind, subject, reasons)
    except CoreRLError as error:
        raise error from cause
