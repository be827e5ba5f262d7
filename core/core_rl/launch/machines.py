"""A function on each machine of `Hosts`, outside of any group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple

from core_rl.launch.hosts import Hosts
from core_rl.launch.messages import Call
from core_rl.launch.pool import RankPool

__all__ = ["call_on_machines"]

ResultT = TypeVar("ResultT")
ArgTs = TypeVarTuple("ArgTs")

NO_ENGINE = 0
CALL_S = 120.0
"""The time limit of the call, in seconds."""


def call_on_machines(
    hosts: Hosts, machines: Sequence[int], fn: Callable[[*ArgTs], ResultT], *args: *ArgTs
) -> dict[int, ResultT]:
    """``fn(*args)`` once on each of ``machines``, in a process that ends afterwards; the results by machine.

    ``fn``, ``args`` and the results are pickled. Raises the error of the first machine that fails, and `GroupError`
    where a process does not come up, ends, or does not answer within two minutes.
    """
    pool = RankPool(hosts)
    try:
        pool.grow(hosts.slots(len(machines), machines, [0]))
        results = pool.call(Call(NO_ENGINE, "run_alone", (fn, args)), [()] * len(machines), CALL_S)
        return dict(zip(machines, results, strict=True))
    finally:
        pool.close()
