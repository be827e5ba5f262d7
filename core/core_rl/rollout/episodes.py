"""Episodes of a rollout by their state, and the bound on episodes ahead of training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core_rl.data.batch import SequenceBatch
from core_rl.errors import EngineStateError, RolloutError
from core_rl.rollout.workflow import AcceptFn, Episode, RolloutWorkflow


@dataclass(frozen=True, kw_only=True)
class StalenessLimit:
    """The bound of AReaL (arXiv:2505.24298), counted in episodes.

    The weights of version ``v`` consume the episodes ``v * consumer_batch_size`` and on. An episode
    that starts at version ``v`` is consumed at most ``max_head_offpolicyness`` versions later if no
    more than ``(max_head_offpolicyness + v + 1) * consumer_batch_size`` were started before its end.
    """

    max_concurrent: int
    """Episodes that run at one time."""
    consumer_batch_size: int
    """Episodes that one version consumes."""
    max_head_offpolicyness: int
    """The most versions by which a consumed episode may be older than the newest weights."""

    def capacity(self, version: int) -> int:
        """The number of episodes that may start before ``version`` rises, episodes of earlier versions included."""
        return (self.max_head_offpolicyness + version + 1) * self.consumer_batch_size

    def within_bound(self, *, consumed: int, started_at: Sequence[int]) -> bool:
        """True if the remaining episodes, in the order of their start, can all be consumed in time.

        ``started_at`` holds their versions; the first of them is the ``consumed``-th episode of the run.
        """
        return all(
            (consumed + index) // self.consumer_batch_size - version <= self.max_head_offpolicyness
            for index, version in enumerate(started_at)
        )


class EpisodeQueue:
    """Episodes that wait, run, or are finished and not consumed. It has no lock: the executor guards it."""

    def __init__(self, limit: StalenessLimit, version: Callable[[], int]) -> None:
        self._limit = limit
        self._version = version
        self._outstanding: dict[int, Episode] = {}
        """Submitted, and neither consumed nor rejected, nor raised as an error."""
        self._waiting: deque[Episode] = deque()
        self._running: set[int] = set()
        self._started_at: dict[int, int] = {}
        """The version at the start of each episode that runs, or that is finished and not consumed."""
        self._finished: dict[int, SequenceBatch] = {}
        self._failed: dict[int, RolloutError] = {}
        self._next = self._consumed = self._accepted = self._rejected = 0

    def claim(self, count: int) -> int:
        """The first of ``count`` new episode numbers."""
        self._next += count
        return self._next - count

    def add(
        self,
        numbered: Iterable[tuple[int, Mapping[str, Any]]],
        workflow: RolloutWorkflow,
        should_accept: AcceptFn | None,
    ) -> None:
        """Let the episodes of samples with their numbers wait."""
        for number, sample in numbered:
            episode = Episode(number=number, data=sample, workflow=workflow, should_accept=should_accept)
            self._outstanding[number] = episode
            self._waiting.append(episode)

    def start_next(self) -> Episode | None:
        """The next episode that may start now, which counts as running; None while there is none."""
        running = len(self._running)
        if not self._waiting or running >= self._limit.max_concurrent or not self._has_capacity(running):
            return None
        episode = self._waiting.popleft()
        self._running.add(episode.number)
        self._started_at[episode.number] = self._version()
        return episode

    def end(self, number: int, result: SequenceBatch | RolloutError | None) -> None:
        """Record the result of a running episode, its error, or None for a rejection."""
        self._running.remove(number)
        if isinstance(result, SequenceBatch):
            self._accepted += 1
            self._finished[number] = result
            return
        del self._started_at[number]
        if result is None:
            self._rejected += 1
            del self._outstanding[number]
        else:
            self._failed[number] = result

    def take(self, count: int, timeout: float | None) -> list[SequenceBatch]:
        """The ``count`` finished episodes that were submitted first; raises `RolloutError` where `ready` is false.

        Raises the error of the first failed episode, if there is one.
        """
        if self._failed:
            number = min(self._failed)
            del self._outstanding[number]
            raise self._failed.pop(number)
        if not self.ready(count):
            raise RolloutError(self._missing(count, timeout))
        self._consumed += count
        numbers = self._earliest(count)
        for number in numbers:
            del self._started_at[number], self._outstanding[number]
        return [self._finished.pop(number) for number in numbers]

    def _earliest(self, count: int) -> list[int]:
        return sorted(self._finished)[:count]

    def wants_more(self) -> bool:
        """True if no episode has failed, and the limit allows more than is submitted."""
        return not self._failed and self._has_capacity(len(self._waiting) + len(self._running))

    def _has_capacity(self, unfinished: int) -> bool:
        """True if the limit allows one more episode than the accepted and the ``unfinished`` ones."""
        return self._accepted + unfinished < self._limit.capacity(self._version())

    def decided(self, count: int) -> bool:
        """True if waiting longer for ``count`` episodes changes nothing."""
        outstanding = len(self._waiting) + len(self._running)
        return bool(self._failed) or self.ready(count) or len(self._finished) + outstanding < count

    def ready(self, count: int) -> bool:
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

    def counters(self) -> dict[str, int]:
        """Numbers of episodes by their state."""
        return {
            "submitted": self._next,
            "waiting": len(self._waiting),
            "running": len(self._running),
            "accepted": self._accepted,
            "rejected": self._rejected,
            "consumed": self._consumed,
        }

    def state_dict(self) -> dict[str, Any]:
        """Counts, and the samples that were submitted and not consumed."""
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
        self, state: Mapping[str, Any], workflow: RolloutWorkflow | None, should_accept: AcceptFn | None
    ) -> None:
        """Continue from `state_dict`; raises `EngineStateError` as `WorkflowExecutor.load_state_dict` does."""
        again = [(int(entry["number"]), entry["data"]) for entry in state["outstanding"]]
        if self._outstanding:
            raise EngineStateError("load_state_dict() while episodes are outstanding; load before submit()")
        if again and workflow is None:
            raise EngineStateError(
                f"load_state_dict() of {len(again)} samples that are to be run again; pass their workflow"
            )
        self._next = int(state["next_episode"])
        self._accepted = self._consumed = int(state["consumed"])
        self._rejected = int(state["rejected"])
        if workflow is not None:
            self.add(again, workflow, should_accept)
