"""Workflows: how one sample of the data becomes sequences to train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMResponse
from core_rl.rollout.continued import TokenGenerator
from core_rl.rollout.transcript import Transcript

__all__ = [
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


def pack_responses(responses: Sequence[LLMResponse]) -> SequenceBatch:
    """Prompt and answer of each response as one sequence, token ids as they were; see `Transcript.pack`."""
    transcripts = [Transcript(response.input_ids) for response in responses]
    for transcript, response in zip(transcripts, responses, strict=True):
        transcript.add_answer(response)
    return Transcript.pack(transcripts)
