"""`EngineGroup`: whatever goes wrong in a rank ends the call with one error, in time, and leaves no process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import group_support as support
import pytest

from core_rl.errors import (
    BatchError,
    CheckpointMismatch,
    ConfigError,
    GroupError,
    RankDied,
    RankFailed,
    RankTimeout,
)
from core_rl.launch import pool, process
from core_rl.launch.group import EngineGroup

TIMEOUT_S = 2.0
LIMIT = r"raise the time limit of the group's calls \(timeout_s\)"
FOREVER_S = 30.0
"""Nothing here takes this long unless it waits for a timeout that it should not wait for."""


@pytest.fixture(scope="module")
def shared() -> Iterator[EngineGroup]:
    with support.echo_group(support.SPEC, support.config(dp=2), timeout_s=120) as group:
        yield group


@pytest.fixture
def group() -> Iterator[EngineGroup]:
    with support.echo_group(support.SPEC, support.config(dp=2), timeout_s=120) as group:
        yield group


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE_S", 0.5)


@contextmanager
def impatient(group: EngineGroup, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """For calls that hang: others may take longer on a busy machine."""
    patience, group.timeout_s = group.timeout_s, timeout_s
    try:
        yield
    finally:
        group.timeout_s = patience


def assert_ended(group: EngineGroup, pids: list[int], reason: str) -> None:
    """No process is left, every call raises the reason, and a restart helps."""
    assert not support.survivors(pids, within_s=0)
    for call in (lambda: group.run(support.whoami), group.initialize, group.destroy, group.get_version):
        with pytest.raises(GroupError, match=rf"this group has ended: .*{reason}.*call restart\(\)"):
            call()
    group.restart()
    group.initialize()
    assert group.run(support.whoami) == [(0,), (1,)]


# ------------------------------------------------------------------ every rank answers: the group continues


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("error", [BatchError("7 tokens too many"), CheckpointMismatch("another model")])
def test_an_error_of_ours_keeps_its_type(shared: EngineGroup, ranks: tuple[int, ...], error: Any) -> None:
    with pytest.raises(type(error), match=str(error)) as caught:
        shared.run(support.fail, ranks, error)
    rank = caught.value.__cause__.rank
    assert rank in ranks
    notes = "\n".join(caught.value.__notes__)
    assert f"rank {rank} of 2" in notes
    assert "in fail\n    raise error" in notes
    assert isinstance(caught.value.__cause__, RankFailed)
    assert "in fail\n    raise error" in caught.value.__cause__.traceback
    assert len(shared.run(support.whoami)) == 2


def test_foreign_error_becomes_rank_failed_with_cause(shared: EngineGroup) -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 failed: KeyError: 'lost'") as caught:
        shared.run(support.fail, (1,), KeyError("lost"))
    assert caught.value.rank == 1
    assert "in fail\n    raise error" in caught.value.traceback
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(shared.run(support.whoami)) == 2


def test_base_exception_does_not_end_the_rank(shared: EngineGroup) -> None:
    with pytest.raises(RankFailed, match="GeneratorExit: of a test framework, say"):
        shared.run(support.fail, (0, 1), GeneratorExit("of a test framework, say"))
    assert len(shared.run(support.whoami)) == 2


def test_unpicklable_error_is_reported_as_text(shared: EngineGroup) -> None:
    with pytest.raises(RankFailed, match=r"rank \d of 2 failed: group_support.OddError: oddity") as caught:
        shared.run(support.fail_oddly)
    assert "in fail_oddly" in caught.value.traceback
    assert len(shared.run(support.whoami)) == 2


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (support.unpicklable, "the result, a lock, cannot be sent to the driver: cannot pickle"),
        (support.poison, "the result of a rank cannot be restored in the driver: restored away from home"),
    ],
)
def test_unpicklable_results_are_refused(shared: EngineGroup, fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(GroupError, match=message):
        shared.run(fn)
    assert len(shared.run(support.whoami)) == 2


@pytest.mark.parametrize(
    ("fn", "args"),
    [(lambda engine: None, ()), (support.echo, (threading.Lock(),)), (support.echo, (lambda: 0,))],
)
def test_unpicklable_calls_are_refused(
    shared: EngineGroup, fn: Callable[..., Any], args: tuple[object, ...]
) -> None:
    with pytest.raises(GroupError, match="cannot be sent to the ranks: .*importable module"):
        shared.run(fn, *args)
    assert len(shared.run(support.whoami)) == 2


def test_unrestorable_calls_are_refused(shared: EngineGroup) -> None:
    with pytest.raises(GroupError, match="cannot be restored in the rank: restored away from home"):
        shared.run(support.echo, support.Poison())
    assert len(shared.run(support.whoami)) == 2


def test_failed_initialize_can_be_repeated(shared: EngineGroup) -> None:
    with pytest.raises(RankFailed, match="no memory for the model"):
        shared.initialize(config=support.config(seed=support.FAILING_SEED, dp=2))
    shared.initialize(config=support.config(dp=2))
    assert len(shared.run(support.whoami)) == 2


@pytest.mark.usefixtures("short_grace")
def test_refusal_beside_slow_import_changes_nothing() -> None:
    with EngineGroup(support.SPEC, support.config(), make_engine=support.make_after_import) as group:
        with pytest.raises(ConfigError, match="this seed is refused"):
            group.initialize(config=support.config(seed=support.FAILING_SEED, dp=2))
        assert group.run(support.whoami) == [(0,)]


@pytest.mark.usefixtures("short_grace")
def test_importing_ranks_keep_group(group: EngineGroup) -> None:
    with pytest.raises(BatchError, match="bad shard"):
        group.run(support.fail_beside_import)
    assert len(group.run(support.whoami)) == 2


# ------------------------------------------------------------------ some rank does not answer: the group ends


@pytest.mark.usefixtures("short_grace")
def test_failure_with_waiting_ranks_ends_group(group: EngineGroup) -> None:
    pids, started = group.pids, time.monotonic()
    with pytest.raises(BatchError, match="bad shard") as caught:
        group.run(support.fail_beside_hang, BatchError("bad shard"))
    assert time.monotonic() - started < FOREVER_S
    assert "Ranks [0] did not answer within 0.5 s after that" in "\n".join(caught.value.__notes__)
    assert_ended(group, pids, "fail_beside_hang failed with BatchError: bad shard")


@pytest.mark.usefixtures("short_grace")
def test_a_failure_inside_a_real_collective(group: EngineGroup) -> None:
    pids = group.pids
    with pytest.raises(BatchError, match="rank left the collective"):
        group.run(support.gloo_sum, 1)
    assert_ended(group, pids, "gloo_sum failed with BatchError")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("_exit", "rank 1 ended with exit code 3 during die"),
        ("exit", "rank 1 ended with exit code 4 during die"),
        ("with children", "rank 1 ended with exit code 5 during die"),
        ("SIGKILL", r"rank 1 was killed by SIGKILL \(out of memory is a common reason\) during die"),
        ("SIGHUP", "rank 1 was killed by SIGHUP during die"),
        (
            "SIGSEGV",
            "rank 1 was killed by SIGSEGV during die\nFatal Python error: Segmentation fault(.|\n)*in die",
        ),
    ],
)
def test_a_death_is_noticed_at_once(group: EngineGroup, how: Any, message: str) -> None:
    pids, started = group.pids, time.monotonic()
    with pytest.raises(RankDied, match=message) as caught:
        group.run(support.die, how)
    assert caught.value.rank == 1
    assert time.monotonic() - started < FOREVER_S
    assert_ended(group, pids, "die failed with RankDied: rank 1")


def test_a_death_is_told_rather_than_its_consequence(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "GRACE_S", 60.0)
    with pytest.raises(RankDied, match="rank 1 ended with exit code 9") as caught:
        group.run(support.fail_beside_death)
    assert "rank 0 failed as well: ConnectionError: peer is gone" in caught.value.__notes__


def test_a_death_between_calls(group: EngineGroup) -> None:
    pids = group.pids
    os.kill(pids[0], signal.SIGKILL)
    assert not support.survivors(pids[:1])
    with pytest.raises(RankDied, match="rank 0 was killed by SIGKILL"):
        group.run(support.whoami)
    assert_ended(group, pids, "rank 0 was killed by SIGKILL")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ranks", "by_name"), [((0, 1), r"\[0, 1\]"), ((1,), r"\[1\]")])
def test_hanging_rank_times_out_with_stack(
    group: EngineGroup, ranks: tuple[int, ...], by_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "DUMP_WAIT_S", 30.0)
    pids, started = group.pids, time.monotonic()
    message = rf"ranks {by_name} of 2 did not answer hang within 4 s, .*{LIMIT}"
    with impatient(group, 4.0), pytest.raises(RankTimeout, match=message) as caught:
        group.run(support.hang, ranks)
    assert 4.0 <= time.monotonic() - started < 4.0 + FOREVER_S
    assert f"Rank {ranks[0]} was at:" in caught.value.traceback
    assert "in hang\n" in caught.value.traceback
    assert_ended(group, pids, "hang failed with RankTimeout")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fn", [support.stop_self, support.hold_interpreter_lock])
def test_unresponsive_rank_is_killed(group: EngineGroup, fn: Callable[..., Any]) -> None:
    pids = group.pids
    with impatient(group), pytest.raises(RankTimeout):
        group.run(fn)
    assert_ended(group, pids, "RankTimeout")


def test_stopped_rank_times_out_on_arguments(group: EngineGroup) -> None:
    pids = group.pids
    os.kill(pids[1], signal.SIGSTOP)
    message = rf"rank 1 did not take the arguments of echo in time\. .*{LIMIT}"
    with impatient(group), pytest.raises(RankTimeout, match=message):
        group.run_each(support.echo, [(bytes(5_000_000),), (bytes(5_000_001),)])
    assert_ended(group, pids, "RankTimeout")


def test_children_of_ranks_end_with_the_group(group: EngineGroup) -> None:
    children = group.run(support.start_child)
    assert all(map(support.is_alive, children))
    with impatient(group), pytest.raises(RankTimeout):
        group.run(support.hang)
    assert not support.survivors(children)


def test_an_interrupt_inside_a_call_ends_the_group(group: EngineGroup, tmp_path: Path) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def alarm() -> None:
        support.await_arrival(tmp_path)
        signal.pthread_kill(this_thread, signal.SIGALRM)

    pids, this_thread = group.pids, threading.get_ident()
    previous = signal.signal(signal.SIGALRM, interrupt)
    thread = threading.Thread(target=alarm)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            group.run(support.arrive_and_wait, str(tmp_path))
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, previous)
    assert_ended(group, pids, "arrive_and_wait failed with KeyboardInterrupt")


def test_concurrent_calls_are_refused(group: EngineGroup, tmp_path: Path) -> None:
    thread = threading.Thread(target=group.run, args=(support.arrive_and_wait, str(tmp_path)))
    thread.start()
    support.await_arrival(tmp_path)
    with pytest.raises(GroupError, match="another call on this group is running"):
        group.run(support.whoami)
    support.let_go(tmp_path)
    thread.join()
    assert len(group.run(support.whoami)) == 2


def test_close_ends_running_calls(group: EngineGroup, tmp_path: Path) -> None:
    errors: list[GroupError] = []

    def call() -> None:
        try:
            group.run(support.arrive_and_wait, str(tmp_path))
        except GroupError as error:
            errors.append(error)

    pids, thread = group.pids, threading.Thread(target=call)
    thread.start()
    support.await_arrival(tmp_path)
    group.close()
    thread.join(FOREVER_S)
    assert not support.survivors(pids)
    assert [type(error) for error in errors] == [RankDied]


def test_close_twice_and_after_the_end(group: EngineGroup) -> None:
    pids = group.pids
    group.close()
    assert not support.survivors(pids, within_s=0)
    group.close()
    with pytest.raises(GroupError, match="it was closed"):
        group.run(support.whoami)
