"""Requests to a fleet: each gives one response, from any server; and log-probs of given tokens as prompts."""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from core_rl.backend.inference_backend import ModelLimits, TopLogprobs
from core_rl.data.batch import SequenceBatch
from core_rl.data.media import NO_MEDIA, Media
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.errors import EngineStateError, RolloutError, UnsupportedCapability
from core_rl.servers.adapters import ServedAdapter
from core_rl.servers.api import Refused, Unreachable
from core_rl.servers.facts import FRESH, UNLABELLED
from core_rl.servers.pool import ServerPool
from core_rl.servers.server import Server
from core_rl.servers.wire import Scores, StaleServer, Wire

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_Result = TypeVar("_Result")
_Row: TypeAlias = tuple[Sequence[int], Media]
"""The tokens of a sequence, and its images."""
FIRST_RETRY_S = 0.1
AT_ONCE = 64
REDRAWS = 16
"""Responses until there is none with a placeholder, which no image belongs to."""
MOST_VALUES = 2**26
"""The most numbers that one call fetches as JSON."""
RECENT = 256
"""Encoded images that are kept, for the groups in flight."""


class ImageFields:
    """Fields of bodies with images for a model; requests that share images share their encoded form."""

    def __init__(self, wire: Wire, model: PretrainedConfig | None) -> None:
        self._wire = wire
        self._recent: OrderedDict[int, tuple[Media, Any]] = OrderedDict()
        self.token: int | None = None if model is None else model.image_token_id
        """The placeholder, which no response holds."""

    def of(self, media: Media, *, scoring: bool = False) -> dict[str, Any]:
        """The fields for a prompt with ``media``; nothing without images."""
        if not media or self.token is None:  # the core refuses images for a model of text
            return {}
        return self._wire.image_fields(self._encoded(media), self.token, scoring=scoring)

    def _encoded(self, media: Media) -> Any:
        # The entry holds the images, so that no others get their id.
        _, form = entry = self._recent.pop(id(media), None) or (media, self._wire.encoded_images(media))
        self._recent[id(media)] = entry
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return form


class Requests:
    """Requests to the servers of ``pool``, some ``at_one_time``, for a ``model``. All run on its event loop.

    Sequences are scored as prompts without a completion.
    """

    def __init__(self, pool: ServerPool, wire: Wire, model: ModelLimits, at_one_time: int) -> None:
        self._pool = pool
        self._wire = wire
        self._images = ImageFields(wire, model.image_model)
        self._vocab_size = model.vocab_size
        # Not a limit of the session: the call that pauses the servers must not wait for requests that it interrupts.
        self._free = asyncio.Semaphore(at_one_time)
        self._timeout_s = pool.options.request_timeout_s

    async def generate(self, request: LLMRequest, eos: Collection[int]) -> LLMResponse:
        """The response to ``request`` from any server; sent again where a server is lost on the way."""

        def read(response: Any, server: Server, adapter: ServedAdapter) -> LLMResponse:
            return _with_versions(server, adapter, self._wire.response(request, response, eos, server.name))

        for server in self._pool.servers:
            if problem := server.limits.sampling_problem(request.sampling):
                raise UnsupportedCapability(f"{server.name} {problem}; {server.limits.remedy}")
        body = self._wire.generation(request, eos) | self._images.of(request.media)
        for _ in range(REDRAWS):
            response = await self._call(self._wire.path, request.input_ids, request.rid, body, read)
            if self._images.token not in response.output_ids:
                return response
        raise RolloutError(
            f"request {request.rid}: {REDRAWS} responses in a row hold the token {self._images.token}, which stands "
            "for an image; train the model on texts without it first"
        )

    async def _call(
        self,
        path: str,
        ids: Sequence[int],
        name: str,
        body: Mapping[str, Any],
        read: Callable[[Any, Server, ServedAdapter], _Result],
    ) -> _Result:
        """``read(response, server, adapter)`` of the response to ``body`` from any server, chosen by ``ids``.

        Where a server is lost, ``body`` is sent again with another rid of the request ``name``, perhaps to another
        server. The attempt before is aborted, so that one call gives one sample.
        """
        async with self._free:
            left, delay_s = self._pool.options.retries, FIRST_RETRY_S
            try:
                while True:
                    server = await self._pool.pick(ids)
                    try:
                        # A server may abort every request whose rid begins so.
                        return await self._attempt(server, path, f"{name}-{left}-", body, read)
                    except (Unreachable, StaleServer) as error:
                        self._pool.mark_lost(server, error)
                        if not left or self._pool.closing:
                            raise
                    await asyncio.sleep(delay_s)
                    left, delay_s = left - 1, 2 * delay_s
            except (asyncio.CancelledError, Unreachable):
                if self._pool.closing:
                    raise EngineStateError(
                        "the engine was destroyed while this request was in flight"
                    ) from None
                raise

    async def _attempt(
        self,
        server: Server,
        path: str,
        rid: str,
        body: Mapping[str, Any],
        read: Callable[[Any, Server, ServedAdapter], _Result],
    ) -> _Result:
        """The response of ``server``; `StaleServer` where that does not know its adapter any more."""
        ended = False
        try:
            with server.busy() as adapter:
                request = {**body, **self._wire.adapter_fields(adapter.name), self._wire.rid: rid}
                result = read(await server.api.post(path, request, self._timeout_s), server, adapter)
            ended = True
            return result
        except Refused as error:
            ended = True
            if self._wire.is_lost(error):
                raise Unreachable(str(error)) from error
            if adapter.name is not None and adapter.name in str(error):
                raise StaleServer(f"{server.name} does not know its adapter: {error}") from error
            raise
        except Unreachable:
            ended = True  # with its connection
            raise
        finally:
            if not ended:
                self._pool.abort(server, rid)

    async def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """Log-probs, float32 ``[T]``.

        Servers give log-probs of a prompt at temperature 1 only; others come from the whole distribution. Raises
        `RolloutError` where that is too much to fetch.
        """
        rows = _rows(batch)
        if temperature == 1.0:
            scored = await self._of_each(rows, 0)
            return torch.cat([F.pad(scores.logprobs, (1, 0)) for scores in scored]).float()
        full = await self._distributions(rows, temperature)
        picked = [
            F.pad(log_p.gather(1, torch.tensor(ids[1:], dtype=torch.long)[:, None]).squeeze(1), (1, 0))
            for (ids, _), log_p in zip(rows, full, strict=True)
        ]
        return torch.cat(picked).float()

    async def top(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        """The ``k`` most likely tokens at each position."""
        rows = _rows(batch)
        if temperature == 1.0:
            tops = [(scores.ids, scores.values) for scores in await self._of_each(rows, k)]
        else:
            full = await self._distributions(rows, temperature)
            tops = [(best.indices, best.values) for best in (log_p.topk(k, dim=-1) for log_p in full)]
        return TopLogprobs(
            ids=torch.cat([F.pad(ids, (0, 0, 1, 0)) for ids, _ in tops]),
            logprobs=torch.cat([F.pad(values, (0, 0, 1, 0)) for _, values in tops]).float(),
        )

    async def _distributions(self, rows: Sequence[_Row], temperature: float) -> list[Tensor]:
        """Log-probs of all tokens, float64 ``[L - 1, V]`` for each row, at the positions after its first token."""
        tokens = sum(len(ids) for ids, _ in rows)
        count = tokens * self._vocab_size
        if count > MOST_VALUES:
            raise RolloutError(
                f"log-probs of {tokens} given tokens at temperature {temperature:g} take {count} numbers "
                "from servers, which give them at temperature 1 only; score at temperature 1, in smaller batches, or "
                "with the train engine's forward()"
            )
        distributions = []
        for scores in await self._of_each(rows, self._vocab_size):
            at_one = torch.zeros_like(scores.values).scatter(1, scores.ids, scores.values)
            distributions.append(torch.log_softmax(at_one / temperature, -1))
        return distributions

    async def _of_each(self, rows: Sequence[_Row], k: int) -> list[Scores]:
        """The scores of each row as a prompt, with the ``k`` best tokens at each position."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(row: _Row) -> Scores:
            ids, media = row
            body = self._wire.scoring(ids, k) | self._images.of(media, scoring=True)
            async with gate:
                return await self._call(
                    self._wire.scoring_path,
                    ids,
                    uuid.uuid4().hex,
                    body,
                    lambda response, server, _: self._wire.scores(response, ids, k, server.name),
                )

        return list(await asyncio.gather(*map(one, rows)))


def _with_versions(server: Server, adapter: ServedAdapter, response: LLMResponse) -> LLMResponse:
    """``response`` with the versions of ``adapter``, which drew it.

    Raises `StaleServer` where ``server`` has lost its label, and so its weights: it has been restarted.
    """
    if UNLABELLED not in response.versions:
        return replace(response, versions=tuple(map(adapter.version_of, response.versions)))
    if server.steered:
        raise StaleServer(f"{server.name} has weights of the version {FRESH!r}")
    return replace(response, versions=(server.version,) * len(response.versions))


def _rows(batch: SequenceBatch) -> list[_Row]:
    ids = [row.tolist() for row in batch.input_ids.split(batch.lengths)]
    return list(zip(ids, batch.media or (NO_MEDIA,) * batch.num_sequences, strict=True))
