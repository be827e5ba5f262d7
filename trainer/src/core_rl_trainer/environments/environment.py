"""Environments: what answers the model between its turns. Token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Environment", "Observation"]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What an environment says to one answer."""

    ids: tuple[int, ...] = ()
    """Tokens that the model sees next, such as the result of a tool; not used when ``done``."""
    reward: float = 0.0
    """For this answer; the rewards of an episode are added up."""
    done: bool = False
    """Whether the episode ends here."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))


class Environment(Protocol):
    """One episode's world; each episode has an object of its own.

    It exists so that tools, games and simulated users need no workflow of their own. It sees and returns tokens
    and never the transcript: the workflow keeps that, so that no token is ever encoded twice.
    """

    async def reset(self, data: Mapping[str, Any]) -> Sequence[int]:
        """Begin with a sample of the data; returns the prompt, the same for the same sample."""
        ...

    async def step(self, output_ids: Sequence[int]) -> Observation:
        """Take one complete answer of the model, its stop token included."""
        ...

    async def close(self) -> None:
        """Free what the episode held. Called once, whatever happened."""
        ...
