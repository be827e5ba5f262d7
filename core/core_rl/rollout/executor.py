"""`WorkflowExecutor`: runs episodes on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from core_rl.data.batch import SequenceBatch
from core_rl.distributed.loop_thread import LoopThread
from core_rl.errors import RolloutError
from core_rl.rollout.episodes import EpisodeQueue, StalenessLimit
from core_rl.rollout.workflow import AcceptFn, Episode, RolloutWorkflow, TokenGenerator

_Data = Mapping[str, Any]


class WorkflowExecutor:
    """Runs episodes concurrently, in two ways.

    `rollout` runs all samples at once and returns when the last one is done. `submit` with `wait`, or
    `prepare`, runs ahead of the consumer, as far as the `StalenessLimit` allows; further samples
    wait for newer weights. Results come in the order of submission.
    Episodes that a filter (``should_accept``) rejects are replaced by others.

    Everything but the episodes runs in the caller's threads; ``_changed`` guards what both touch.
    """

    def __init__(self, engine: TokenGenerator, limit: StalenessLimit, version: Callable[[], int]) -> None:
        self._engine = engine
        self._limit = limit
        self._episodes = EpisodeQueue(limit, version)
        self._changed = threading.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._will_start = False
        self._loop = LoopThread("core-rl-rollout")

    # ------------------------------------------------------------ synchronous

    def rollout(
        self,
        data: Sequence[_Data],
        workflow: RolloutWorkflow,
        timeout: float | None = None,
        should_accept: AcceptFn | None = None,
    ) -> list[SequenceBatch]:
        """Run one episode for each sample and return their batches in the order of ``data``.

        Rejected samples are left out. The staleness limit does not apply. The first episode that
        fails, or the end of ``timeout`` seconds, cancels the others and raises `RolloutError`.
        """
        self._loop.check_caller()
        with self._changed:
            first = self._episodes.claim(len(data))
        episodes = [
            Episode(number=first + index, data=sample, workflow=workflow, should_accept=should_accept)
            for index, sample in enumerate(data)
        ]
        done: list[int] = []
        future = self._loop.run(self._run_all(episodes, done))
        try:
            results = future.result(timeout)
        except TimeoutError as error:
            missing = len(data) - len(done)
            raise RolloutError(
                f"{missing} of {len(data)} samples have no result after {timeout} s"
            ) from error
        finally:
            future.cancel()
        return [result for result in results if result is not None]

    async def _run_all(self, episodes: Sequence[Episode], done: list[int]) -> list[SequenceBatch | None]:
        free = asyncio.Semaphore(self._limit.max_concurrent)

        async def run(episode: Episode) -> SequenceBatch | None:
            async with free:
                result = await episode.run(self._engine)
            done.append(episode.number)
            return result

        tasks = [asyncio.ensure_future(run(episode)) for episode in episodes]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    # ----------------------------------------------------------- asynchronous

    def submit(self, data: _Data, workflow: RolloutWorkflow, should_accept: AcceptFn | None = None) -> int:
        """Queue one sample and return the number of its episode. Never waits."""
        return self.submit_all([data], workflow, should_accept)[0]

    def submit_all(
        self, data: Sequence[_Data], workflow: RolloutWorkflow, should_accept: AcceptFn | None = None
    ) -> list[int]:
        """Queue samples so that all of them that may start do so at once; the numbers of their episodes."""
        with self._changed:
            first = self._episodes.claim(len(data))
            self._episodes.add(enumerate(data, first), workflow, should_accept)
        self.wake()
        return list(range(first, first + len(data)))

    def wait(self, count: int, timeout: float | None = None) -> list[SequenceBatch]:
        """``count`` accepted episodes, the earliest submitted of the finished ones.

        Episodes that still run are waited for too where they would otherwise be too old when they are
        consumed. Raises `RolloutError` when an episode failed (the others stay and can be waited for),
        when ``timeout`` seconds pass (all stay), and when fewer than ``count`` are left.
        """
        self._loop.check_caller()
        with self._changed:
            self._changed.wait_for(lambda: self._episodes.decided(count), timeout)
            return self._episodes.take(count, timeout)

    def prepare(
        self,
        loader: Iterator[Sequence[_Data]],
        workflow: RolloutWorkflow,
        timeout: float | None = None,
        should_accept: AcceptFn | None = None,
    ) -> list[SequenceBatch]:
        """The episodes of one optimizer step; ``loader`` is read as far as the limit allows.

        Raises as `wait` does; also when ``loader`` ends too early.
        """
        self._loop.check_caller()
        deadline = None if timeout is None else time.monotonic() + timeout
        count = self._limit.consumer_batch_size
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            with self._changed:
                self._changed.wait_for(
                    lambda: self._episodes.decided(count) or self._episodes.wants_more(), left
                )
                if not self._episodes.wants_more():
                    return self._episodes.take(count, timeout)
            samples = next(loader, None)
            if samples is None:
                return self.wait(count, left)
            self.submit_all(samples, workflow, should_accept)

    def wake(self) -> None:
        """Start the waiting episodes that may start now; called when the version has changed."""
        self._loop.soon(self._start_ready)

    def _start_ready(self) -> None:
        """On the loop: start waiting episodes while there is room, and wake the callers."""
        self._will_start = False
        with self._changed:
            while (episode := self._episodes.start_next()) is not None:
                task = asyncio.ensure_future(self._run_counted(episode))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            self._changed.notify_all()

    async def _run_counted(self, episode: Episode) -> None:
        result: SequenceBatch | RolloutError | None
        try:
            result = await episode.run(self._engine)
        except RolloutError as error:
            result = error
        with self._changed:
            self._episodes.end(episode.number, result)
        if not self._will_start:  # once for all episodes that end at one time
            self._will_start = True
            asyncio.get_running_loop().call_soon(self._start_ready)

    # ------------------------------------------------------------------- state

    def counters(self) -> dict[str, int]:
        """Numbers of episodes by their state; `rollout` counts in ``submitted`` only."""
        with self._changed:
            return self._episodes.counters()

    def state_dict(self) -> dict[str, Any]:
        """State for a run checkpoint: counts, and the samples to run again. JSON if the samples are.

        These are all samples that were submitted and not consumed, finished or not, in the order of submission.
        """
        with self._changed:
            return self._episodes.state_dict()

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        workflow: RolloutWorkflow | None = None,
        should_accept: AcceptFn | None = None,
    ) -> None:
        """Continue from `state_dict`: its samples are submitted to ``workflow`` again, under their numbers.

        Raises `EngineStateError` while episodes are outstanding, and when there is no workflow for samples.
        """
        with self._changed:
            self._episodes.load_state_dict(state, workflow, should_accept)
        self.wake()

    def close(self) -> None:
        """Cancel all episodes and end the thread; see `LoopThread.close`."""
        self._loop.close()
