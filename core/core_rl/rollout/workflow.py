"""Workflows, which turn a sample into sequences to train on: generation, transcripts and episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, Protocol

import torch

from core_rl.data.batch import SequenceBatch
from core_rl.data.media import NO_MEDIA, Media
from core_rl.data.requests import LLMRequest, LLMResponse, StopReason
from core_rl.distributed.loop_thread import being_cancelled
from core_rl.errors import RolloutError
from core_rl.seeds import derive_seed

__all__ = [
    "AcceptFn",
    "Episode",
    "RolloutWorkflow",
    "TokenGenerator",
    "Transcript",
    "generate_whole",
    "pack_responses",
]

MAX_ABORTS = 8
"""Aborts in a row without a new token, after which an engine counts as broken."""


class TokenGenerator(Protocol):
    """The part of an engine that a workflow uses."""

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Continue one prompt."""
        ...


async def generate_whole(engine: TokenGenerator, request: LLMRequest) -> LLMResponse:
    """Continue a prompt to its end: where the engine aborts, the tokens so far go in as a longer prompt.

    Servers abort when new weights arrive. The tokens before keep their log-probs and their version, and no
    token is drawn twice. Sampling that depends on the tokens so far (penalties, ``stop``) begins anew.

    Raises `RolloutError` when the engine aborts again and again without a new token.
    """
    parts: list[LLMResponse] = []
    idle = 0
    while True:
        part = await engine.agenerate(_remainder(request, parts))
        if part.stop_reason == "abort" and request.sampling.reads_the_response:
            # A continued request has lost the state of its penalties.
            part = replace(part, output_ids=(), logprobs=(), versions=())
        parts.append(part)
        if part.stop_reason != "abort":
            return part if len(parts) == 1 else _joined(request, parts, part.stop_reason)
        if sum(len(p.output_ids) for p in parts) == request.sampling.max_new_tokens:
            return _joined(request, parts, "length")
        idle = 0 if part.output_ids else idle + 1
        if idle == MAX_ABORTS:
            raise RolloutError(f"request {request.rid} was aborted {idle} times in a row without a new token")


def _remainder(request: LLMRequest, parts: Sequence[LLMResponse]) -> LLMRequest:
    if not parts:
        return request
    drawn = tuple(chain.from_iterable(part.output_ids for part in parts))
    sampling = request.sampling
    seed = sampling.seed if sampling.seed is None or not drawn else derive_seed(sampling.seed, len(drawn))
    left = replace(sampling, max_new_tokens=sampling.max_new_tokens - len(drawn), seed=seed)
    return replace(
        request, input_ids=request.input_ids + drawn, sampling=left, rid=f"{request.rid}-{len(parts)}"
    )


def _joined(request: LLMRequest, parts: Sequence[LLMResponse], stop_reason: StopReason) -> LLMResponse:
    return LLMResponse(
        rid=request.rid,
        input_ids=request.input_ids,
        output_ids=tuple(chain.from_iterable(part.output_ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        versions=tuple(chain.from_iterable(part.versions for part in parts)),
        stop_reason=stop_reason,
        latency_s=sum(part.latency_s for part in parts),
    )


class Transcript:
    """One sequence: a prompt, then completions of the model, with tokens of an environment between them."""

    def __init__(self, prompt_ids: Sequence[int], media: Media = NO_MEDIA) -> None:
        self._ids = list(prompt_ids)
        self.media = media
        """The images of the prompt."""
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
        from the rollout, 0 elsewhere) and ``versions`` (int64; -1 elsewhere). Meta: ``stop_reason``.
        """

        def joined(values: Iterable[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
            # A tensor for each sequence would cost more than its values.
            return torch.tensor(list(chain.from_iterable(values)), dtype=dtype)

        return SequenceBatch(
            input_ids=joined((t._ids for t in transcripts), torch.long),
            cu_seqlens=torch.tensor([0, *accumulate(map(len, transcripts))], dtype=torch.int32),
            tokens={
                "loss_mask": joined((t._mask for t in transcripts), torch.bool),
                "logprobs": joined((t._logprobs for t in transcripts), torch.float32),
                "versions": joined((t._versions for t in transcripts), torch.long),
            },
            meta={"stop_reason": [t.stop_reason for t in transcripts]},
            media=tuple(t.media for t in transcripts) if any(t.media for t in transcripts) else (),
        )


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
        except (Exception, SystemExit) as error:  # it would end the thread of all episodes
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


def pack_responses(responses: Sequence[LLMResponse], media: Media = NO_MEDIA) -> SequenceBatch:
    """Prompt and answer of each response as one sequence, token ids as they were; see `Transcript.pack`.

    ``media`` are the images of their prompt, which all share.
    """
    transcripts = [Transcript(response.input_ids, media) for response in responses]
    for transcript, response in zip(transcripts, responses, strict=True):
        transcript.add_response(response)
    return Transcript.pack(transcripts)
