"""Workflows, which turn one sample of the data into sequences to train on, and their episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMResponse
from core_rl.distributed.loop_thread import being_cancelled
from core_rl.errors import RolloutError
from core_rl.rollout.continued import TokenGenerator
from core_rl.rollout.transcript import Transcript

__all__ = [
    "AcceptFn",
    "Episode",
    "RolloutWorkflow",
    "TokenGenerator",
    "pack_responses",
]


class RolloutWorkflow(Protocol):
    """Runs one episode. It knows nothing of queues, versions or other episodes: the executor does."""

    async def arun_episode(
        self, engine: TokenGenerator, data: Mapping[str, Any], episode: int
    ) -> SequenceBatch | None:
        """The sequences of one sample, or None to reject it.

        ``episode`` numbers the samples of a run in the order of submission, also after a resume: the
        source of seeds and of the numbers of groups.
        """
        ...


AcceptFn = Callable[[SequenceBatch], bool]
"""A filter: true for sequences of an episode that are trained on. It runs on the event loop and must be quick."""


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One run of a workflow over one sample."""

    number: int
    data: Mapping[str, Any]
    workflow: RolloutWorkflow
    should_accept: AcceptFn | None = None

    async def run(self, engine: TokenGenerator) -> SequenceBatch | None:
        """The sequences of the sample, or None where the workflow or the filter rejects it.

        Any failure raises `RolloutError` with the number of the episode and the original chained.
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
        except RolloutError as error:
            raise RolloutError(f"episode {self.number} failed: {error}") from error
        except (Exception, SystemExit) as error:  # one that escapes would end the thread of all episodes
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
        except (Exception, SystemExit) as error:
            name = getattr(self.should_accept, "__name__", type(self.should_accept).__name__)
            raise RolloutError(
                f"episode {self.number}: the filter {name} raised {type(error).__name__}: {error}"
            ) from error


def pack_responses(responses: Sequence[LLMResponse]) -> SequenceBatch:
    """Prompt and answer of each response as one sequence, token ids as they were; see `Transcript.pack`."""
    transcripts = [Transcript(response.input_ids) for response in responses]
    for transcript, response in zip(transcripts, responses, strict=True):
        transcript.add_response(response)
    return Transcript.pack(transcripts)
