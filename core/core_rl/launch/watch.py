"""`Watch`: which ranks have answered, and which have ended without an answer."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Iterable

from core_rl.launch.hosts.base import Rank

__all__ = ["Watch"]


class Watch:
    """Waits for ranks. Each is registered once and not for each wait: many ranks may answer one by one."""

    def __init__(self, ranks: Iterable[Rank]) -> None:
        self._poll = select.poll()
        self._owners: dict[int, Rank] = {}
        for rank in ranks:
            for end in (rank.channel.fileno(), rank.sentinel):
                self._poll.register(end, select.POLLIN)
                self._owners[end] = rank

    def ready(self, deadline: float) -> list[tuple[Rank, bool]]:
        """Ranks that answered (True) or ended without an answer (False); empty at ``deadline``, a `time.monotonic`."""
        left = max(0.0, deadline - time.monotonic())
        found = dict(self._poll.poll(math.ceil(1000 * left)))
        ranks = {self._owners[end].rank: self._owners[end] for end in found}
        return [(rank, rank.channel.fileno() in found) for rank in ranks.values()]

    def drop(self, rank: Rank) -> None:
        """Wait for ``rank`` no longer."""
        for end in (rank.channel.fileno(), rank.sentinel):
            self._poll.unregister(end)
