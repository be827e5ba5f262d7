"""The executor: order, the bound on staleness, failures, timeouts, and its thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from group_support import eventually
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_support import GatedWorkflow, keys, one_token

from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.distributed import loop_thread
from core_rl.errors import EngineStateError, RolloutError
from core_rl.rollout.episodes import StalenessLimit
from core_rl.rollout.executor import WorkflowExecutor
from core_rl.rollout.workflow import TokenGenerator


class NoEngine:
    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        raise AssertionError("these workflows generate nothing")


class Run:
    """An executor and the version that its driver has set."""

    def __init__(self, *, batch: int = 2, ahead: int = 0, concurrent: int = 100) -> None:
        self.version = 0
        limit = StalenessLimit(
            max_concurrent=concurrent, consumer_batch_size=batch, max_head_offpolicyness=ahead
        )
        self.executor = WorkflowExecutor(NoEngine(), limit, lambda: self.version)

    def publish(self) -> None:
        self.version += 1
        self.executor.wake()


@pytest.fixture
def gated() -> GatedWorkflow:
    return GatedWorkflow()


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        run.executor.close()


def start(runs: list[Run], **fields: int) -> Run:
    runs.append(Run(**fields))
    return runs[-1]


def ids(batches: list[SequenceBatch]) -> list[int]:
    return [int(batch.input_ids[0]) for batch in batches]


class Sleeper:
    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        await asyncio.sleep(data["delay"])
        return None if data.get("reject") else one_token(data["key"])


def test_rollout_keeps_the_order_of_data(runs: list[Run]) -> None:
    data = [{"key": i, "delay": 0.001 * (7 * i % 5)} for i in range(20)]
    assert ids(start(runs).executor.rollout(data, Sleeper())) == list(range(20))


def test_rollout_leaves_rejected_samples_out(runs: list[Run]) -> None:
    data = [{"key": i, "delay": 0.0, "reject": i % 2} for i in range(6)]
    assert ids(start(runs).executor.rollout(data, Sleeper())) == [0, 2, 4]


def test_rollout_is_bounded_by_concurrency_alone(runs: list[Run], gated: GatedWorkflow) -> None:
    run = start(runs, batch=1, ahead=0, concurrent=3)
    thread = threading.Thread(target=run.executor.rollout, args=(keys(0, 1, 2, 3, 4), gated))
    thread.start()
    assert gated.wait_started(3) == [0, 1, 2]
    gated.release(0, 1, 2, 3, 4)
    thread.join(60)
    assert sorted(gated.started) == [0, 1, 2, 3, 4]


def test_failed_episode_cancels_the_rollout(runs: list[Run], gated: GatedWorkflow) -> None:
    gated.fail.add(1)
    gated.release(1)
    with pytest.raises(RolloutError, match="episode 1 failed: ValueError: no luck with 1") as caught:
        start(runs).executor.rollout(keys(0, 1, 2), gated)
    assert isinstance(caught.value.__cause__, ValueError)
    eventually(lambda: sorted(gated.cancelled) == [0, 2])


def test_rollout_timeout_counts_missing_samples(runs: list[Run], gated: GatedWorkflow) -> None:
    gated.release(0)
    run = start(runs)
    with pytest.raises(RolloutError, match=r"2 of 3 samples have no result after 1 s"):
        run.executor.rollout(keys(0, 1, 2), gated, timeout=1)
    eventually(lambda: sorted(gated.cancelled) == [1, 2])
    assert ids(run.executor.rollout(keys(0), gated)) == [0]


def test_wait_sorts_by_submission(runs: list[Run], gated: GatedWorkflow) -> None:
    run = start(runs, batch=4)
    for sample in keys(0, 1, 2, 3):
        run.executor.submit(sample, gated)
    gated.wait_started(4)
    gated.release(3, 1)
    assert ids(run.executor.wait(2, timeout=60)) == [1, 3]
    gated.release(0, 2)
    assert ids(run.executor.wait(2, timeout=60)) == [0, 2]


@pytest.mark.parametrize(("ahead", "at_zero", "at_one"), [(0, 2, 4), (1, 4, 6), (2, 6, 8)])
def test_no_more_start_than_the_version_allows(
    runs: list[Run], gated: GatedWorkflow, ahead: int, at_zero: int, at_one: int
) -> None:
    run = start(runs, batch=2, ahead=ahead)
    for sample in keys(*range(10)):
        run.executor.submit(sample, gated)
    assert gated.wait_started(at_zero) == list(range(at_zero))
    gated.release(*range(10))
    eventually(lambda: run.executor.counters()["accepted"] == at_zero)
    assert ids(run.executor.wait(2, timeout=60)) == [0, 1]
    assert gated.wait_started(at_zero) == list(range(at_zero))
    run.publish()
    assert gated.wait_started(at_one) == list(range(at_one))


def test_rejected_and_failed_episodes_make_room(runs: list[Run], gated: GatedWorkflow) -> None:
    gated.reject.add(0)
    gated.fail.add(1)
    gated.release(*range(6))
    run = start(runs, batch=2)
    for sample in keys(*range(6)):
        run.executor.submit(sample, gated)
    assert gated.wait_started(4) == [0, 1, 2, 3]
    with pytest.raises(RolloutError, match="episode 1 failed"):
        run.executor.wait(2, timeout=60)
    assert ids(run.executor.wait(2, timeout=60)) == [2, 3]
    assert run.executor.counters() == {
        "submitted": 6, "waiting": 2, "running": 0, "accepted": 2, "rejected": 1, "consumed": 2
    }  # fmt: skip


def test_concurrency_is_bounded(runs: list[Run], gated: GatedWorkflow) -> None:
    run = start(runs, batch=100, concurrent=3)
    for sample in keys(*range(5)):
        run.executor.submit(sample, gated)
    assert gated.wait_started(3) == [0, 1, 2]
    gated.release(1)
    assert gated.wait_started(4) == [0, 1, 2, 3]


def test_wait_includes_slow_episodes_before_too_old(runs: list[Run], gated: GatedWorkflow) -> None:
    """Otherwise the fast ones overtake it again and again, and it is consumed at any age."""
    run = start(runs, batch=2, ahead=1)
    for sample in keys(*range(8)):
        run.executor.submit(sample, gated)
    gated.release(*range(1, 8))
    eventually(lambda: run.executor.counters()["accepted"] == 3)
    assert ids(run.executor.wait(2, timeout=60)) == [1, 2]
    run.publish()
    eventually(lambda: run.executor.counters()["accepted"] == 5)
    with pytest.raises(RolloutError, match="1 run"):
        run.executor.wait(2, timeout=0.1)
    gated.release(0)
    assert ids(run.executor.wait(2, timeout=60))[0] == 0


class Aging:
    """Each episode returns the version at which it started."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        version = self._run.version
        await asyncio.sleep(data["delay"] / 2000)
        return one_token(version) if data["accept"] else None


@settings(max_examples=20)
@given(
    samples=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=12, max_size=40),
    batch=st.integers(1, 4),
    ahead=st.integers(0, 3),
    concurrent=st.integers(1, 8),
)
def test_no_consumed_episode_is_older_than_the_bound(
    samples: list[tuple[int, int]], batch: int, ahead: int, concurrent: int
) -> None:
    run = Run(batch=batch, ahead=ahead, concurrent=concurrent)
    data = [{"delay": delay, "accept": luck > 0} for delay, luck in samples]
    accepted = sum(sample["accept"] for sample in data)
    loader = iter([data[i : i + 3] for i in range(0, len(data), 3)])
    try:
        for _ in range(accepted // batch):
            started = ids(run.executor.prepare(loader, Aging(run), timeout=60))
            assert len(started) == batch
            assert all(0 <= run.version - version <= ahead for version in started)
            run.publish()
        with pytest.raises(RolloutError, match="are left; submit more"):
            run.executor.prepare(loader, Aging(run), timeout=60)
    finally:
        run.executor.close()


def test_prepare_draws_only_as_far_as_the_bound(runs: list[Run], gated: GatedWorkflow) -> None:
    run = start(runs, batch=2, ahead=1)
    loader = iter([keys(i) for i in range(20)])
    gated.release(*range(20))
    assert ids(run.executor.prepare(loader, gated, timeout=60)) == [0, 1]
    assert next(loader) == keys(4)


def test_waiting_for_missing_episodes_raises(runs: list[Run], gated: GatedWorkflow) -> None:
    run = start(runs)
    run.executor.submit(keys(0)[0], gated)
    with pytest.raises(RolloutError, match="2 episodes were asked for, and only 1 are left"):
        run.executor.wait(2)


def test_timeout_explains_and_loses_nothing(runs: list[Run], gated: GatedWorkflow) -> None:
    run = start(runs, batch=2)
    for sample in keys(0, 1, 2):
        run.executor.submit(sample, gated)
    gated.release(0)
    eventually(lambda: run.executor.counters()["accepted"] == 1)
    message = (
        r"2 of 3 episodes are missing after 0\.1 s: 1 run, 1 wait .* version 0 \(max_head_offpolicyness = 0\)"
    )
    with pytest.raises(RolloutError, match=message):
        run.executor.wait(3, timeout=0.1)
    gated.release(1)
    assert ids(run.executor.wait(2, timeout=60)) == [0, 1]


class Returns:
    def __init__(self, value: Any) -> None:
        self._value = value

    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        return self._value() if callable(self._value) else self._value  # type: ignore[no-any-return]


def cancel_oneself() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"input_ids": [1]}, "returned {'input_ids'"),
        (SequenceBatch.from_sequences([]), "returned SequenceBatch"),
        (cancel_oneself, "its workflow cancelled itself"),
    ],
)
@pytest.mark.parametrize("mode", ["submit", "rollout"])
def test_broken_workflow_contract_is_named(runs: list[Run], value: Any, message: str, mode: str) -> None:
    executor = start(runs).executor
    if mode == "submit":
        executor.submit({}, Returns(value))
    with pytest.raises(RolloutError, match=f"episode 0.*{message}"):
        _ = executor.wait(1, timeout=60) if mode == "submit" else executor.rollout([{}], Returns(value))


def test_state_goes_on_with_numbers_and_room(runs: list[Run], gated: GatedWorkflow) -> None:
    gated.release(*range(10))
    first = start(runs, batch=2)
    for sample in keys(0, 1, 2):
        first.executor.submit(sample, gated)
    first.executor.wait(2, timeout=60)
    state = first.executor.state_dict()
    assert state == {
        "next_episode": 3, "consumed": 2, "rejected": 0, "outstanding": [{"number": 2, "data": {"key": 2}}]
    }  # fmt: skip

    second = start(runs, batch=2)
    second.version = 1
    again = GatedWorkflow()
    with pytest.raises(EngineStateError, match="1 samples that are to be run again; pass their workflow"):
        second.executor.load_state_dict(state)
    second.executor.load_state_dict(state, again)
    assert [second.executor.submit(sample, again) for sample in keys(3, 4, 5)] == [3, 4, 5]
    assert again.wait_started(2) == [2, 3]
    with pytest.raises(EngineStateError, match="outstanding"):
        second.executor.load_state_dict(state, again)


def test_state_has_all_unconsumed_samples(runs: list[Run], gated: GatedWorkflow) -> None:
    """Finished, failed, running and waiting ones; consumed, rejected and raised ones are not."""
    gated.reject.add(2)
    gated.fail.update({3, 4})
    gated.release(0, 1, 2, 3, 4, 5)
    run = start(runs, batch=2, ahead=1)
    for sample in keys(0, 1, 2, 5, 6, 7):
        run.executor.submit(sample, gated)
    gated.wait_started(5)
    assert ids(run.executor.wait(2, timeout=60)) == [0, 1]
    for sample in keys(3, 4):
        run.executor.submit(sample, gated)
    run.publish()
    eventually(lambda: run.executor.counters()["running"] == 2)
    with pytest.raises(RolloutError, match="episode 6 failed: ValueError: no luck with 3"):
        run.executor.wait(2, timeout=60)
    state = run.executor.state_dict()
    assert [entry["data"]["key"] for entry in state["outstanding"]] == [5, 6, 7, 4]
    assert (state["consumed"], state["rejected"]) == (2, 1)


class Numbered:
    """Each episode returns its number and its key, after a delay that depends on the key."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        await asyncio.sleep(data["key"] % 3 / 1000)
        return None if data["key"] % 7 == 6 else one_token(data["key"])


@settings(max_examples=20)
@given(batch=st.integers(1, 4), ahead=st.integers(0, 3), stops=st.sets(st.integers(1, 5)))
def test_interruptions_lose_nothing_and_count_nothing_twice(batch: int, ahead: int, stops: set[int]) -> None:
    """A new executor, and a loader that continues where the first one stopped, after each of the steps ``stops``."""
    drawn, consumed = iter(range(10_000)), []
    loader = ([{"key": next(drawn)} for _ in range(batch)] for _ in range(10_000))
    run = Run(batch=batch, ahead=ahead)
    for step in range(1, 7):
        consumed += ids(run.executor.prepare(loader, Numbered(run), timeout=60))
        run.publish()
        if step in stops:
            state = run.executor.state_dict()
            run.executor.close()
            run = Run(batch=batch, ahead=ahead)
            run.version = step
            run.executor.load_state_dict(state, Numbered(run))
    left = [entry["data"]["key"] for entry in run.executor.state_dict()["outstanding"]]
    run.executor.close()
    accepted = [key for key in range(next(drawn)) if key % 7 != 6]
    assert len(consumed) == len(set(consumed)) == 6 * batch
    assert sorted({*consumed, *(key for key in left if key % 7 != 6)}) == accepted
    assert not {*consumed} & {*left}


def test_rejected_episodes_are_replaced(runs: list[Run], gated: GatedWorkflow) -> None:
    gated.release(*range(20))
    run = start(runs, batch=2)
    loader = iter([keys(2 * i, 2 * i + 1) for i in range(10)])

    def odd(batch: SequenceBatch) -> bool:
        return bool(batch.input_ids[0] % 2)

    assert ids(run.executor.prepare(loader, gated, 60, odd)) == [1, 3]
    assert run.executor.counters()["rejected"] == 2
    assert ids(run.executor.rollout(keys(4, 5, 6, 7), gated, 60, odd)) == [5, 7]
    assert ids(run.executor.rollout(keys(4), gated, 60, lambda batch: False)) == []


def test_failing_filter_names_the_episode(runs: list[Run], gated: GatedWorkflow) -> None:
    def broken(batch: SequenceBatch) -> bool:
        return bool(batch["rewards"].all())

    gated.release(0)
    run = start(runs)
    run.executor.submit(keys(0)[0], gated, broken)
    with pytest.raises(RolloutError, match="episode 0: the filter broken raised BatchError: .*'rewards'"):
        run.executor.wait(1, timeout=60)


def test_samples_submitted_together_start_together(runs: list[Run], gated: GatedWorkflow) -> None:
    """An engine that answers concurrent requests in one batch sees the same batch each time."""
    run = start(runs, batch=100)
    assert run.executor.submit_all(keys(*range(50)), gated) == list(range(50))
    gated.wait_started(1)
    assert gated.started == list(range(50))


def rollout_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "core-rl-rollout"]


def test_close_cancels_and_leaves_no_thread(gated: GatedWorkflow) -> None:
    before = rollout_threads()
    executor = Run(batch=3).executor
    for sample in keys(0, 1, 2):
        executor.submit(sample, gated)
    gated.wait_started(3)
    executor.close()
    executor.close()
    assert sorted(gated.cancelled) == [0, 1, 2]
    assert rollout_threads() == before


def test_close_names_blocking_workflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "CLOSE_TIMEOUT_S", 0.1)
    executor, blocked, free = Run().executor, threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        free.wait(60)

    executor.submit({}, Returns(block))
    assert blocked.wait(60)
    with pytest.raises(RolloutError, match="an episode blocks the rollout thread"):
        executor.close()
    free.set()
    monkeypatch.undo()
    executor._loop._thread.join(60)
    assert not executor._loop._thread.is_alive()


def test_workflow_cannot_wait_for_its_executor(runs: list[Run]) -> None:
    executor = start(runs).executor
    with pytest.raises(RolloutError, match="EngineStateError: a workflow called a blocking method"):
        executor.rollout([{}], Returns(lambda: executor.rollout([{}], Returns(None))))
