"""How far rollouts may run ahead of training."""

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
    """How many versions older than the newest weights a consumed episode may be."""

    def ahead(self, *, version: int, accepted: int, running: int) -> int:
        """How many more episodes may start before ``version`` rises; 0 or less is none."""
        return (self.max_head_offpolicyness + version + 1) * self.consumer_batch_size - (accepted + running)

    def room(self, *, version: int, accepted: int, running: int) -> int:
        """How many more may start now."""
        return min(
            self.max_concurrent - running, self.ahead(version=version, accepted=accepted, running=running)
        )

    def keeps(self, *, consumed: int, started_at: Sequence[int]) -> bool:
        """Whether the episodes that are left, in the order of their start, can all be consumed in time.

        ``started_at`` holds their versions; the first of them is the ``consumed``-th episode of the run.
        """
        return all(
            (consumed + place) // self.consumer_batch_size - version <= self.max_head_offpolicyness
            for place, version in enumerate(started_at)
        )
