from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from core_rl.distributed.loop_thread import LoopThread


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
