"""`Wire`: requests and responses, as the servers of one product write them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from core_rl.data.media import Media
from core_rl.data.requests import LLMRequest, LLMResponse
from core_rl.errors import RolloutError, UnsupportedCapability
from core_rl.servers.api import Refused
from core_rl.servers.facts import owner_of, version_in


class StaleServer(RolloutError):
    """The server responded with weights that this engine never gave it: it has been restarted."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Log-probs of the tokens of one sequence of ``L`` after the first, float64."""

    logprobs: Tensor
    """``[L - 1]``"""
    ids: Tensor
    """The most likely tokens, best first, ``[L - 1, k]``."""
    values: Tensor
    """Their log-probs, ``[L - 1, k]``."""

    @staticmethod
    def checked(
        logprobs: Sequence[float],
        best: Sequence[Sequence[tuple[int, float]]],
        ids: Sequence[int],
        k: int,
        server: str,
    ) -> Scores:
        """Of the tokens ``ids``, ``best`` as pairs of token and log-prob; `RolloutError` where they are not whole."""
        complete = len(logprobs) == len(ids) - 1 and all(map(math.isfinite, logprobs))
        if k:
            complete = complete and len(best) == len(ids) - 1 and all(len(position) == k for position in best)
        if not complete:
            raise RolloutError(f"{server} did not score all of {len(ids)} tokens")
        flat = [pair for position in best for pair in position] if k else []
        return Scores(
            logprobs=torch.tensor(logprobs, dtype=torch.float64),
            ids=torch.tensor([token for token, _ in flat], dtype=torch.long).reshape(len(ids) - 1, k),
            values=torch.tensor([value for _, value in flat], dtype=torch.float64).reshape(len(ids) - 1, k),
        )

    @staticmethod
    def of_tokens(
        positions: Sequence[Mapping[str, Mapping[str, Any]]], ids: Sequence[int], k: int, server: str
    ) -> Scores:
        """As `checked`, of vLLM's ``prompt_logprobs`` after the first: by token, the given one and the best."""
        pairs = zip(ids[1:], positions, strict=True)
        logprobs = [float(position[str(token)]["logprob"]) for token, position in pairs]
        scored = [
            [(int(token), float(entry["logprob"])) for token, entry in position.items()]
            for position in positions
        ]
        best = [sorted(tokens, key=itemgetter(1), reverse=True)[:k] for tokens in scored]
        return Scores.checked(logprobs, best, ids, k, server)


class Wire(ABC):
    """The requests that draw tokens, and that score them, on servers of one kind."""

    path: str
    """Path of requests that draw tokens."""
    rid: str
    """The field of a request's name, which the kit fills in: another one for each attempt."""

    @property
    def scoring_path(self) -> str:
        """Path of requests that score; by default `path`."""
        return self.path

    @abstractmethod
    def generation(self, request: LLMRequest, eos: Collection[int]) -> dict[str, Any]:
        """The body for ``request``; ``eos`` are the model's end-of-sequence tokens."""

    @abstractmethod
    def adapter_fields(self, name: str | None) -> dict[str, str]:
        """The fields of a body that is answered with the adapter ``name``, or with none."""

    @abstractmethod
    def response(self, request: LLMRequest, response: Any, eos: Collection[int], server: str) -> LLMResponse:
        """The draw in ``response`` from ``server``.

        Raises `RolloutError` for a malformed response, and `StaleServer` for one by foreign weights.
        """

    def is_lost(self, error: Refused) -> bool:
        """Whether ``error`` says that the server will never answer again."""
        return False

    def encoded_images(self, media: Media) -> Any:
        """The part of `image_fields` that requests with the same images share; by default a server takes none."""
        raise UnsupportedCapability(
            f"servers with {self.path} take no tensors of images; leave the images out"
        )

    def image_fields(self, encoded: Any, token: int, *, scoring: bool) -> dict[str, Any]:
        """The fields of a body with ``encoded`` images, next to the fields of `generation` or `scoring`.

        ``token`` is the placeholder in the prompt.
        """
        raise NotImplementedError

    @abstractmethod
    def scoring(self, ids: Sequence[int], k: int) -> dict[str, Any]:
        """The body of a request that draws nothing which counts, and scores ``ids`` at temperature 1.

        The response has the ``k`` most likely tokens at each position.
        """

    @abstractmethod
    def scores(self, response: Any, ids: Sequence[int], k: int, server: str) -> Scores:
        """The answer in ``response`` from ``server``; `RolloutError` where it is malformed or not whole."""


@contextmanager
def readable(response: Any, subject: str) -> Iterator[None]:
    """Raise `RolloutError` with ``response`` where the context cannot read it; ``subject`` says from where it came."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RolloutError(f"{subject} that cannot be read ({error!r}): {str(response)[:300]}") from error


def version_of(label: str, server: str) -> int:
    """The version in the ``label`` of weights, `UNLABELLED` for weights that were not updated since the server started.

    Raises `StaleServer` for weights that this process did not give it.
    """
    version = version_in(label)
    if version is None:
        owner = owner_of(label)
        by = "" if owner is None else f", which {owner} loaded"
        raise StaleServer(f"{server} has weights of the version {label!r}{by}")
    return version


def versions_of(spans: list[dict[str, Any]], count: int, server: str) -> tuple[int, ...]:
    """The version of each of ``count`` tokens, from the server's record of the updates on the way.

    Raises `StaleServer` for weights that this engine did not give it, and `ValueError` for spans of other tokens.
    """
    versions: list[int] = []
    for span in spans:
        version = version_of(str(span["version"]), server)
        if span["start"] != len(versions):
            raise ValueError(f"its weight versions leave out tokens: {spans}")
        versions += [version] * (span["end"] - span["start"])
    if len(versions) != count:
        raise ValueError(f"its weight versions are of {len(versions)} tokens, and there are {count}")
    return tuple(versions)
