"""Which server a prompt goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

__all__ = ["PrefixRouter"]

BLOCK = 16
"""Prefixes are remembered at multiples of so many tokens."""
REMEMBERED = 100_000
"""Prefixes; the ones that were not used for longest are forgotten."""
SLACK = 16
"""A server may have so many requests more than the idlest one before it loses a prompt that it knows."""


class PrefixRouter:
    """Sends a prompt to the server that has seen its longest prefix, unless that one has much more to do than others.

    So the samples of a group, and the turns of a conversation, find the keys and values of their prefix in a cache.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[int, str] = OrderedDict()
        """By the hash of a prefix, the server that has seen it last."""

    def pick(self, ids: Sequence[int], loads: Mapping[str, int]) -> str:
        """The name of one of the servers in ``loads``, which says how many requests each has in flight."""
        prefixes = _prefixes(ids)
        idlest = min(loads, key=lambda name: loads[name])
        known = next((self._seen[key] for key in reversed(prefixes) if self._seen.get(key) in loads), idlest)
        chosen = known if loads[known] <= loads[idlest] + SLACK else idlest
        for key in prefixes:
            self._seen[key] = chosen
            self._seen.move_to_end(key)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return chosen

    def forget(self, name: str) -> None:
        """The caches of the server ``name`` are empty."""
        for key in [key for key, owner in self._seen.items() if owner == name]:
            del self._seen[key]


def _prefixes(ids: Sequence[int]) -> list[int]:
    """A hash of each prefix whose length is a multiple of `BLOCK`, and of the whole, the shortest first."""
    found, running = [], 0
    for start in range(0, len(ids), BLOCK):
        running = hash((running, *ids[start : start + BLOCK]))
        found.append(running)
    return found
