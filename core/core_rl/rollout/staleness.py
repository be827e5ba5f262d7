"""`StalenessLimit`: the bound on rollouts that run ahead of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StalenessLimit"]


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

    def ahead(self, *, version: int, accepted: int, running: int) -> int:
        """The number of episodes that may still start before ``version`` rises; 0 or less is none."""
        return (self.max_head_offpolicyness + version + 1) * self.consumer_batch_size - (accepted + running)

    def room(self, *, version: int, accepted: int, running: int) -> int:
        """The number of episodes that may still start now."""
        return min(
            self.max_concurrent - running, self.ahead(version=version, accepted=accepted, running=running)
        )

    def within_bound(self, *, consumed: int, started_at: Sequence[int]) -> bool:
        """True if the remaining episodes, in the order of their start, can all be consumed in time.

        ``started_at`` holds their versions; the first of them is the ``consumed``-th episode of the run.
        """
        return all(
            (consumed + index) // self.consumer_batch_size - version <= self.max_head_offpolicyness
            for index, version in enumerate(started_at)
        )
