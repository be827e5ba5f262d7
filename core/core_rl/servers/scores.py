"""Log-probs of given tokens, from servers' log-probs of prompt tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from core_rl.backend.inference_backend import TopLogprobs
from core_rl.data.batch import SequenceBatch
from core_rl.errors import RolloutError
from core_rl.servers.calls import Requests
from core_rl.servers.wire import Scores, Wire

__all__ = ["Scorer"]

AT_ONCE = 64
MOST_VALUES = 2**26
"""The most numbers that one call fetches as JSON."""


class Scorer:
    """Scores sequences as prompts without a completion."""

    def __init__(self, requests: Requests, wire: Wire, vocab_size: int) -> None:
        self._requests = requests
        self._wire = wire
        self._vocab_size = vocab_size

    async def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """Log-probs, float32 ``[T]``.

        Servers give those of a prompt at temperature 1 only; others are made from the whole distribution. Raises
        `RolloutError` where that is too much to fetch.
        """
        rows = _rows(batch)
        if temperature == 1.0:
            found = await self._of_each(rows, 0)
            return torch.cat([F.pad(scores.logprobs, (1, 0)) for scores in found]).float()
        full = await self._distributions(rows, temperature)
        picked = [
            F.pad(log_p.gather(1, torch.tensor(ids[1:], dtype=torch.long)[:, None]).squeeze(1), (1, 0))
            for ids, log_p in zip(rows, full, strict=True)
        ]
        return torch.cat(picked).float()

    async def top(self, batch: SequenceBatch, k: int, temperature: float) -> TopLogprobs:
        """The ``k`` most likely tokens at each position."""
        rows = _rows(batch)
        if temperature == 1.0:
            found = [(scores.ids, scores.values) for scores in await self._of_each(rows, k)]
        else:
            full = await self._distributions(rows, temperature)
            found = [(best.indices, best.values) for best in (log_p.topk(k, dim=-1) for log_p in full)]
        return TopLogprobs(
            ids=torch.cat([F.pad(ids, (0, 0, 1, 0)) for ids, _ in found]),
            logprobs=torch.cat([F.pad(values, (0, 0, 1, 0)) for _, values in found]).float(),
        )

    async def _distributions(self, rows: Sequence[Sequence[int]], temperature: float) -> list[Tensor]:
        """Log-probs of all tokens, float64 ``[L - 1, V]`` for each row, at the positions after its first token."""
        wanted = sum(map(len, rows)) * self._vocab_size
        if wanted > MOST_VALUES:
            raise RolloutError(
                f"log-probs of {sum(map(len, rows))} given tokens at temperature {temperature:g} take {wanted} numbers "
                "from servers, which give them at temperature 1 only; score at temperature 1, in smaller batches, or "
                "with the train engine's forward()"
            )
        found = []
        for scores in await self._of_each(rows, self._vocab_size):
            at_one = torch.zeros_like(scores.values).scatter(1, scores.ids, scores.values)
            found.append(torch.log_softmax(at_one / temperature, -1))
        return found

    async def _of_each(self, rows: Sequence[Sequence[int]], k: int) -> list[Scores]:
        """The scores of each row as a prompt, with the ``k`` best tokens at each position."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(ids: Sequence[int]) -> Scores:
            body = {**self._wire.scoring(ids, k), self._wire.rid: uuid.uuid4().hex}
            async with gate:
                return await self._requests.call(
                    body, lambda found, server, _: self._wire.scores(found, ids, k, server.name)
                )

        return list(await asyncio.gather(*map(one, rows)))


def _rows(batch: SequenceBatch) -> list[list[int]]:
    return [row.tolist() for row in batch.input_ids.split(batch.lengths)]
