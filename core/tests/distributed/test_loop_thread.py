from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from functools import partial

import pytest

from core_rl.distributed.loop_thread import Handover, LoopThread


def test_error_of_cancelled_work_stays_quiet(caplog: pytest.LogCaptureFixture) -> None:
    running, ended, loop = threading.Event(), threading.Event(), LoopThread("work")

    async def work() -> None:
        running.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            loop.soon(ended.set)
            raise ValueError("the server is gone") from None

    future = loop.run(work())
    running.wait()
    future.cancel()
    ended.wait()
    loop.wait(asyncio.sleep(0))
    del future  # it leads to the task, which logs an unread error at its end
    gc.collect()
    loop.close()
    assert [record.getMessage() for record in caplog.records] == []


class YieldingLock:
    """A lock after whose first release another thread has its turn."""

    meanwhile: Callable[[], None] | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()


def test_handover_loses_no_result_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    handover, lock = Handover(), YieldingLock()
    monkeypatch.setattr(handover, "_lock", lock)

    async def gather() -> list[int]:
        first, second = (asyncio.get_running_loop().create_future() for _ in range(2))
        lock.meanwhile = partial(handover.set_result, second, 2)
        handover.set_result(first, 1)
        return await asyncio.wait_for(asyncio.gather(first, second), 20)

    assert asyncio.run(gather()) == [1, 2]


def test_handover_to_closed_loop_is_dropped() -> None:
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    loop.close()
    Handover().set_result(future, 1)
    assert not future.done()
