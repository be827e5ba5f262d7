"""Steps that all ranks take together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from checkpoint_support import on_ranks

from core_rl.distributed import agreement
from core_rl.distributed.agreement import first_on_each_machine, gather_or_raise, on_all, on_leader
from core_rl.distributed.comm import Comm
from core_rl.errors import BatchError, CheckpointError, LossError


def failing(error: Exception, *ranks: int) -> Callable[[Comm], Callable[[], int]]:
    def of(comm: Comm) -> Callable[[], int]:
        def compute() -> int:
            if comm.rank in ranks:
                raise error
            return comm.rank * 10

        return compute

    return of


def test_results_of_all_ranks() -> None:
    whole = failing(KeyError())
    assert on_ranks(3, lambda comm: gather_or_raise(comm, whole(comm), "a step")) == [[0, 10, 20]] * 3
    assert on_ranks(3, lambda comm: on_all(comm, whole(comm), "a step")) == [0, 10, 20]
    assert on_ranks(3, lambda comm: on_leader(comm, whole(comm), "a step")) == [0, 0, 0]


@pytest.mark.parametrize("together", [gather_or_raise, on_all])
@pytest.mark.parametrize(
    ("error", "settings", "kind", "reason"),
    [
        (BatchError("too long"), {}, BatchError, "too long"),
        (BatchError("too long"), {"kind": CheckpointError}, CheckpointError, "too long"),
        (ValueError("odd"), {}, CheckpointError, "ValueError: odd"),
        (KeyError("lost"), {}, CheckpointError, "KeyError: 'lost'"),
    ],
)
def test_rank_error_is_raised_on_all_ranks(
    together: Any, error: Exception, settings: Any, kind: type[Exception], reason: str
) -> None:
    computed = failing(error, 1, 2)
    raised = on_ranks(3, lambda comm: together(comm, computed(comm), "a step", **settings))
    assert {type(found) for found in raised} == {kind}
    assert {str(found) for found in raised} == {f"a step: ranks 1, 2: {reason}"}
    assert [found.__cause__ for found in raised] == [None, error, error]


def test_foreign_exception_takes_given_kind() -> None:
    with pytest.raises(LossError, match="^a step: ValueError: odd$"):
        gather_or_raise(Comm(), failing(ValueError("odd"), 0)(Comm()), "a step", foreign=LossError)
    with pytest.raises(BatchError):
        gather_or_raise(Comm(), failing(BatchError("too long"), 0)(Comm()), "a step", foreign=LossError)


def test_leader_error_is_raised_on_all_ranks() -> None:
    computed = failing(OSError(28, "No space left on device", "/data/weights"), 0)
    raised = on_ranks(2, lambda comm: on_leader(comm, computed(comm), "a step"))
    assert {str(found) for found in raised} == {"a step: rank 0: weights: No space left on device"}


def test_a_single_rank_is_not_numbered() -> None:
    with pytest.raises(BatchError, match="^a step: too long$"):
        on_all(Comm(), failing(BatchError("too long"), 0)(Comm()), "a step")


def test_first_rank_of_each_machine_runs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, bool]] = []

    def act(comm: Comm) -> int:
        def action(first: bool) -> int:
            calls.append((comm.rank, first))
            return comm.rank

        return first_on_each_machine(comm, action, "a step")

    monkeypatch.setattr(agreement, "node", lambda: "here")
    assert on_ranks(3, act) == [0, 1, 2]
    assert calls[0] == (0, True)
    assert sorted(calls[1:]) == [(1, False), (2, False)]
