"""Log-probs of given tokens, from SGLang's log-probs of prompt tokens."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core_rl.backend.inference_backend import TopLogprobs
from core_rl.data.batch import SequenceBatch
from core_rl.errors import RolloutError
from core_rl_sglang.calls import Requests
from core_rl_sglang.responses import readable

__all__ = ["Scorer"]

AT_ONCE = 64
MOST_VALUES = 2**26
"""The most numbers that one call fetches as JSON."""


class Scorer:
    """Scores sequences as prompts without a completion."""

    def __init__(self, requests: Requests, vocab_size: int) -> None:
        self._requests = requests
        self._vocab_size = vocab_size

    async def score(self, batch: SequenceBatch, temperature: float) -> Tensor:
        """Log-probs, float32 ``[T]``.

        SGLang gives those of a prompt at temperature 1 only; others are made from the whole distribution. Raises
        `RolloutError` where that is too much to fetch.
        """
        rows = _rows(batch)
        if temperature == 1.0:
            found = await self._of_each(rows, 0)
            # The first token of a sequence has no log-prob.
            return torch.tensor(
                [value or 0.0 for meta in found for value, *_ in meta["input_token_logprobs"]]
            )
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
            found = [_top_of(meta, k) for meta in await self._of_each(rows, k)]
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
                "from SGLang, which gives them at temperature 1 only; score at temperature 1, in smaller batches, or "
                "with the train engine's forward()"
            )
        found = []
        for meta in await self._of_each(rows, self._vocab_size):
            ids, values = _top_of(meta, self._vocab_size)
            at_one = torch.zeros_like(values).scatter(1, ids, values)
            found.append(torch.log_softmax(at_one / temperature, -1))
        return found

    async def _of_each(self, rows: Sequence[Sequence[int]], k: int) -> list[dict[str, Any]]:
        """The servers' ``meta_info`` of each row as a prompt, with the ``k`` best tokens at each position."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(ids: Sequence[int]) -> dict[str, Any]:
            body = {
                "rid": uuid.uuid4().hex,
                "input_ids": list(ids),
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": k,
            }
            async with gate:
                return await self._requests.call(
                    body, lambda response, server, _: _checked(response, len(ids), k, server.address)
                )

        return list(await asyncio.gather(*map(one, rows)))


def _rows(batch: SequenceBatch) -> list[list[int]]:
    return [row.tolist() for row in batch.input_ids.split(batch.lengths)]


def _top_of(meta: dict[str, Any], k: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probs ``[L - 1, k]`` (float64), best first."""
    positions = meta["input_top_logprobs"][1:]
    ids = torch.tensor([[token for _, token, _ in position] for position in positions], dtype=torch.long)
    values = torch.tensor([[value for value, *_ in position] for position in positions], dtype=torch.float64)
    return ids.reshape(-1, k), values.reshape(-1, k)


def _checked(response: Any, count: int, k: int, address: str) -> dict[str, Any]:
    """The ``meta_info`` of a complete response, or `RolloutError`."""
    with readable(response, f"SGLang server {address} gave scores"):
        meta: dict[str, Any] = response["meta_info"]
        logprobs = [entry[0] for entry in meta["input_token_logprobs"]]
        whole = len(logprobs) == count and all(math.isfinite(value) for value in logprobs[1:])
        if k:
            best = meta["input_top_logprobs"][1:]
            whole = whole and len(best) == count - 1 and all(len(position) == k for position in best)
    if not whole:
        raise RolloutError(
            f"SGLang server {address} did not score all of {count} tokens: {meta.get('finish_reason')}"
        )
    return meta
