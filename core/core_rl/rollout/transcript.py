"""Transcripts: the tokens of an episode as they were given and drawn, never decoded and encoded again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core_rl.data.batch import SequenceBatch
from core_rl.data.requests import LLMResponse, StopReason

__all__ = ["Transcript"]


class Transcript:
    """One sequence: a prompt, then completions of the model, with tokens of an environment between them."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._ids = list(prompt_ids)
        self._mask = [False] * len(self._ids)
        self._logprobs = [0.0] * len(self._ids)
        self._versions = [-1] * len(self._ids)
        self.turns = 0
        """Completions so far."""
        self.last_response: tuple[int, ...] = ()
        """The tokens of the last of them."""
        self.stop_reason: StopReason = "stop"
        """The stop reason of the last completion, or ``length`` where the context or the turns were used up."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens so far: the prompt of the next completion."""
        return tuple(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def add_response(self, response: LLMResponse) -> None:
        """Append the tokens that the model drew; they are trained."""
        assert response.input_ids == self.ids
        self._ids += response.output_ids
        self._mask += [True] * len(response.output_ids)
        self._logprobs += response.logprobs
        self._versions += response.versions
        self.turns += 1
        self.last_response = response.output_ids
        self.stop_reason = response.stop_reason

    def add_environment(self, ids: Sequence[int]) -> None:
        """Append tokens that the model did not draw; they are not trained."""
        self._ids += ids
        self._mask += [False] * len(ids)
        self._logprobs += [0.0] * len(ids)
        self._versions += [-1] * len(ids)

    @staticmethod
    def pack(transcripts: Sequence[Transcript]) -> SequenceBatch:
        """The transcripts as sequences.

        Token fields: ``loss_mask`` (bool; the completions, their stop tokens included), ``logprobs`` (float32;
        those of the rollout, 0 elsewhere) and ``versions`` (int64; -1 elsewhere). Meta: ``stop_reason``.
        """
        return SequenceBatch.from_sequences(
            [t._ids for t in transcripts],
            tokens={
                "loss_mask": [torch.tensor(t._mask, dtype=torch.bool) for t in transcripts],
                "logprobs": [torch.tensor(t._logprobs, dtype=torch.float32) for t in transcripts],
                "versions": [torch.tensor(t._versions, dtype=torch.long) for t in transcripts],
            },
            meta={"stop_reason": [t.stop_reason for t in transcripts]},
        )
