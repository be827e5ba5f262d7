"""`WorkflowExecutor`: runs episodes on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from core_rl.data.batch import SequenceBatch
from core_rl.errors import EngineStateError, RolloutError
from core_rl.rollout.loop_thread import LoopThread
from core_rl.rollout.staleness import StalenessLimit
from core_rl.rollout.workflow import AcceptFn, Episode, RolloutWorkflow, TokenGenerator

__all__ = ["WorkflowExecutor"]

_Data = Mapping[str, Any]


class WorkflowExecutor:
    """Runs episodes concurrently, in two ways.

    `rollout` runs all samples at once and returns when the last one is done. `submit` with `wait`, or
    `prepare`, runs ahead of the consumer, as far as the `StalenessLimit` allows; what is submitted beyond
    it waits for newer weights. Results come in the order of submission.
    Episodes that a filter (``should_accept``) rejects are replaced by others.

    Everything but the episodes runs in the caller's threads; ``_changed`` guards what both touch.
    """

    def __init__(self, engine: TokenGenerator, limit: StalenessLimit, version: Callable[[], int]) -> None:
        self._engine = engine
        self._limit = limit
        self._version = version
        self._changed = threading.Condition()
        self._outstanding: dict[int, Episode] = {}
        """Submitted, and neither consumed nor rejected, nor raised as an error."""
        self._waiting: deque[Episode] = deque()
        self._running: set[int] = set()
        self._started_at: dict[int, int] = {}
        """The version at the start of each episode that runs, or that is finished and not consumed."""
        self._finished: dict[int, SequenceBatch] = {}
        self._failed: dict[int, RolloutError] = {}
        self._next = self._consumed = self._accepted = self._rejected = 0
        self._tasks: set[asyncio.Task[None]] = set()
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
        first = self._claim(len(data))
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
            first = self._claim(len(data))
            self._queue(enumerate(data, first), workflow, should_accept)
        self.wake()
        return list(range(first, first + len(data)))

    def _queue(
        self,
        numbered: Iterable[tuple[int, _Data]],
        workflow: RolloutWorkflow,
        should_accept: AcceptFn | None,
    ) -> None:
        for number, sample in numbered:
            episode = Episode(number=number, data=sample, workflow=workflow, should_accept=should_accept)
            self._outstanding[number] = episode
            self._waiting.append(episode)

    def wait(self, count: int, timeout: float | None = None) -> list[SequenceBatch]:
        """``count`` accepted episodes, the earliest submitted of those that are finished.

        Episodes that still run are waited for too where they would otherwise be too old when they are
        consumed. Raises `RolloutError` when an episode failed (the others stay and can be waited for),
        when ``timeout`` seconds pass (all stay), and when fewer than ``count`` are left.
        """
        self._loop.check_caller()
        with self._changed:
            self._changed.wait_for(lambda: self._decided(count), timeout)
            return self._take(count, timeout)

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
                self._changed.wait_for(lambda: self._decided(count) or self._has_capacity(), left)
                if self._failed or not self._has_capacity():
                    return self._take(count, timeout)
            samples = next(loader, None)
            if samples is None:
                return self.wait(count, left)
            self.submit_all(samples, workflow, should_accept)

    def _take(self, count: int, timeout: float | None) -> list[SequenceBatch]:
        if self._failed:
            number = min(self._failed)
            del self._outstanding[number]
            raise self._failed.pop(number)
        if not self._ready(count):
            raise RolloutError(self._missing(count, timeout))
        self._consumed += count
        numbers = self._earliest(count)
        for number in numbers:
            del self._started_at[number], self._outstanding[number]
        return [self._finished.pop(number) for number in numbers]

    def _earliest(self, count: int) -> list[int]:
        return sorted(self._finished)[:count]

    def wake(self) -> None:
        """Start the waiting episodes that may start now; called when the version has changed."""
        self._loop.soon(self._start_ready)

    def _start_ready(self) -> None:
        """On the loop: start waiting episodes while there is room."""
        with self._changed:
            while self._waiting and self._room() > 0:
                episode = self._waiting.popleft()
                self._running.add(episode.number)
                self._started_at[episode.number] = self._version()
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
            self._running.remove(episode.number)
            if isinstance(result, SequenceBatch):
                self._accepted += 1
                self._finished[episode.number] = result
            else:
                del self._started_at[episode.number]
                if result is None:
                    self._rejected += 1
                    del self._outstanding[episode.number]
                else:
                    self._failed[episode.number] = result
            self._changed.notify_all()
        self._start_ready()

    # -------------------------------------------------------------- conditions

    def _room(self) -> int:
        return self._limit.room(version=self._version(), running=len(self._running), accepted=self._accepted)

    def _has_capacity(self) -> bool:
        """True if the limit allows more than is submitted."""
        outstanding = len(self._waiting) + len(self._running)
        return self._limit.ahead(version=self._version(), accepted=self._accepted, running=outstanding) > 0

    def _decided(self, count: int) -> bool:
        """True if waiting longer for ``count`` episodes changes nothing."""
        outstanding = len(self._waiting) + len(self._running)
        return bool(self._failed) or self._ready(count) or len(self._finished) + outstanding < count

    def _ready(self, count: int) -> bool:
        """True if ``count`` are finished, and taking them makes no older one too old."""
        if len(self._finished) < count or not self._running:
            return len(self._finished) >= count
        left = sorted(self._started_at.keys() - set(self._earliest(count)))
        starts = [self._started_at[number] for number in left]
        return self._limit.within_bound(consumed=self._consumed + count, started_at=starts)

    def _missing(self, count: int, timeout: float | None) -> str:
        done, running, waiting = len(self._finished), len(self._running), len(self._waiting)
        if done + running + waiting < count:
            return (
                f"{count} episodes were asked for, and only {done + running + waiting} are left; "
                f"submit more, or publish newer weights than version {self._version()}"
            )
        text = f"{max(count - done, 0)} of {count} episodes are missing after {timeout or 0:.3g} s: {running} run"
        if waiting:
            text += (
                f", {waiting} wait for room or for newer weights than version {self._version()} "
                f"(max_head_offpolicyness = {self._limit.max_head_offpolicyness})"
            )
        if self._rejected:
            text += f"; {self._rejected} were rejected so far"
        return text

    # ------------------------------------------------------------------- state

    def counters(self) -> dict[str, int]:
        """Numbers of episodes by their state; `rollout` counts in ``submitted`` only."""
        with self._changed:
            return {
                "submitted": self._next,
                "waiting": len(self._waiting),
                "running": len(self._running),
                "accepted": self._accepted,
                "rejected": self._rejected,
                "consumed": self._consumed,
            }

    def state_dict(self) -> dict[str, Any]:
        """State for a run checkpoint: counts, and the samples to run again. JSON if the samples are.

        These are all samples that were submitted and not consumed, finished or not, in the order of submission.
        """
        with self._changed:
            return {
                "next_episode": self._next,
                "consumed": self._consumed,
                "rejected": self._rejected,
                "outstanding": [
                    {"number": number, "data": dict(self._outstanding[number].data)}
                    for number in sorted(self._outstanding)
                ],
            }

    def load_state_dict(
        self,
        state: Mapping[str, Any],
        workflow: RolloutWorkflow | None = None,
        should_accept: AcceptFn | None = None,
    ) -> None:
        """Continue from `state_dict`: its samples are submitted to ``workflow`` again, under their numbers.

        Raises `EngineStateError` while episodes are outstanding, and when there is no workflow for samples.
        """
        again = [(int(entry["number"]), entry["data"]) for entry in state["outstanding"]]
        with self._changed:
            if self._outstanding:
                raise EngineStateError(
                    "load_state_dict() while episodes are outstanding; load before submit()"
                )
            if again and workflow is None:
                raise EngineStateError(
                    f"load_state_dict() of {len(again)} samples that are to be run again; pass their workflow"
                )
            self._next = int(state["next_episode"])
            self._accepted = self._consumed = int(state["consumed"])
            self._rejected = int(state["rejected"])
            if workflow is not None:
                self._queue(again, workflow, should_accept)
        self.wake()

    def _claim(self, count: int) -> int:
        """The first of ``count`` new episode numbers."""
        with self._changed:
            first = self._next
            self._next += count
            return first

    def close(self) -> None:
        """Cancel all episodes and end the thread; see `LoopThread.close`."""
        self._loop.close()
