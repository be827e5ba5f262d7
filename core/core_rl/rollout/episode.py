"""One episode: a sample, the workflow that runs it, and the filter that takes or leaves its sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from core_rl.data.batch import SequenceBatch
from core_rl.errors import RolloutError
from core_rl.rollout.loop_thread import being_cancelled
from core_rl.rollout.workflow import RolloutWorkflow, TokenGenerator

__all__ = ["AcceptFn", "Episode"]

AcceptFn = Callable[[SequenceBatch], bool]
"""Whether the sequences of an episode are worth training on. Runs on the event loop: it must be quick."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What the executor runs."""

    number: int
    data: Mapping[str, Any]
    workflow: RolloutWorkflow
    should_accept: AcceptFn | None = None

    async def run(self, engine: TokenGenerator) -> SequenceBatch | None:
        """The sequences of the sample, or None where the workflow or the filter rejects it.

        Whatever goes wrong is a `RolloutError` that names the episode, with the original chained.
        """
        result = self._checked(await self._sequences(engine))
        return result if result is not None and self._accepts(result) else None

    async def _sequences(self, engine: TokenGenerator) -> object:
        try:
            return await self.workflow.arun_episode(engine, self.data, self.number)
        except asyncio.CancelledError as error:
            if being_cancelled():
                raise
            raise RolloutError(f"episode {self.number} failed: its workflow cancelled itself") from error
        except Exception as error:
            raise RolloutError(f"episode {self.number} failed: {type(error).__name__}: {error}") from error

    def _checked(self, result: object) -> SequenceBatch | None:
        if result is None or (isinstance(result, SequenceBatch) and result.num_sequences):
            return result
        raise RolloutError(
            f"episode {self.number}: {type(self.workflow).__name__} returned {result!r}; "
            "a workflow returns a SequenceBatch with sequences, or None to reject the sample"
        )

    def _accepts(self, result: SequenceBatch) -> bool:
        if self.should_accept is None:
            return True
        try:
            return bool(self.should_accept(result))
        except Exception as error:
            name = getattr(self.should_accept, "__name__", type(self.should_accept).__name__)
            raise RolloutError(
                f"episode {self.number}: the filter {name} raised {type(error).__name__}: {error}"
            ) from error
