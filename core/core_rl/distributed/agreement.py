"""Steps that all ranks take together: the failure of one rank is an error of all of them, and never a hang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from platform import node
from typing import TypeVar, cast

from safetensors import SafetensorError

from core_rl.distributed.comm import Comm
from core_rl.errors import CheckpointError, CoreRLError, raise_all

T = TypeVar("T")


def gather_or_raise(
    comm: Comm,
    compute: Callable[[], T],
    subject: str,
    kind: type[CoreRLError] | None = None,
    foreign: type[CoreRLError] = CheckpointError,
) -> list[T]:
    """``compute()`` of every rank, in rank order; the results are pickled. Collective.

    When it raises anywhere, every rank raises one error about ``subject`` that lists the ranks and
    their reasons: of ``kind``, or by default of the first failure's own type if it is a `CoreRLError`,
    and else of ``foreign``. On a rank that failed, the original is chained.
    """
    value: T | None = None
    cause: Exception | None = None
    try:
        value = compute()
    except Exception as error:  # noqa: BLE001  # the other ranks wait for this one, whatever it raised
        cause = error
    failure = (
        None
        if cause is None
        else (type(cause) if isinstance(cause, CoreRLError) else foreign, describe(cause))
    )
    answers = comm.gather((value, failure))
    failures = {rank: error for rank, (_, error) in enumerate(answers) if error is not None}
    if failures:
        first, _ = next(iter(failures.values()))
        reasons = {rank: reason for rank, (_, reason) in failures.items()}
        try:
            raise_all(kind or first, subject, _by_reason(reasons) if comm.size > 1 else reasons.values())
        except CoreRLError as error:
            raise error from cause
    return [cast("T", value) for value, _ in answers]


def on_all(comm: Comm, action: Callable[[], T], subject: str, kind: type[CoreRLError] | None = None) -> T:
    """``action()`` on every rank; returns this rank's own result, and raises as `gather_or_raise` does. Collective."""
    results: list[T] = []
    gather_or_raise(comm, lambda: results.append(action()), subject, kind)
    return results[0]


def on_leader(comm: Comm, action: Callable[[], T], subject: str, kind: type[CoreRLError] | None = None) -> T:
    """``action()`` on rank 0 alone; every rank returns its result, or raises as `gather_or_raise` does. Collective."""
    result = on_all(comm, lambda: action() if comm.rank == 0 else None, subject, kind)
    return comm.broadcast(cast("T", result))


def first_on_each_machine(comm: Comm, action: Callable[[bool], T], subject: str) -> T:
    """``action(True)`` on one rank of each machine, then ``action(False)`` on its others. Collective.

    For files on the machine's disk. Returns this rank's own result, and raises as `gather_or_raise` does.
    """
    is_first = comm.gather(node()).index(node()) == comm.rank
    result = on_all(comm, lambda: action(True) if is_first else None, subject)
    return on_all(comm, lambda: cast("T", result) if is_first else action(False), subject)


def error_of(step: Callable[[], None]) -> Exception | None:
    """The error of ``step()`` where the other ranks are in the middle of a collective stream; None for none."""
    try:
        step()
    except Exception as error:  # noqa: BLE001  # this rank takes part to the end, whatever failed on it
        return error
    return None


def describe(error: Exception) -> str:
    """The reason of ``error`` in one line, with the file's name where the error has one."""
    if isinstance(error, OSError) and error.strerror:
        name = f"{Path(str(error.filename)).name}: " if error.filename else ""
        return name + error.strerror
    if isinstance(error, CoreRLError | SafetensorError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _by_reason(reasons: dict[int, str]) -> list[str]:
    """Each reason once, after the ranks that gave it."""
    ranks: dict[str, list[str]] = {}
    for rank, reason in reasons.items():
        ranks.setdefault(reason, []).append(str(rank))
    return [
        f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}: {reason}" for reason, numbers in ranks.items()
    ]
