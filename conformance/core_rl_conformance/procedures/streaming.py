"""The other end of a weight sync by ``tensor`` or ``distributed``: a receiver and a sender that are no engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from core_rl.engines.inference import InferenceEngine
from core_rl.engines.meta import WeightUpdateMeta
from core_rl.engines.weight_stream import abandon, send_tensors
from core_rl.errors import WeightsError
from core_rl.launch.group import EngineGroup
from core_rl_conformance.pools import CALL_TIMEOUT_S
from core_rl_conformance.reference.taking import taking

__all__ = ["Caught", "caught", "sent", "tensors_of"]


POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Caught:
    """What a sender sent."""

    tensors: dict[str, Tensor]
    buckets: tuple[tuple[str, ...], ...]
    """The names in each bucket."""
    sizes: tuple[int, ...]
    """Bytes of the tensors of each bucket."""


def caught(group: EngineGroup, meta: WeightUpdateMeta) -> Caught:
    """What ``group`` uploads with ``meta``."""
    with ThreadPoolExecutor(1) as pool:
        future: Future[Caught] = pool.submit(_catch, meta)
        try:
            group.upload_weights(meta)
        finally:
            # Whoever failed before it met the receiver leaves it waiting.
            while not future.done():
                abandon(meta)
                wait([future], POLL_S)
        return future.result()


def _catch(meta: WeightUpdateMeta) -> Caught:
    with taking(meta, CALL_TIMEOUT_S) as received:
        buckets = list(received)
    return Caught(
        tensors={name: tensor for bucket in buckets for name, tensor in bucket},
        buckets=tuple(tuple(name for name, _ in bucket) for bucket in buckets),
        sizes=tuple(sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets),
    )


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """The tensors of a model directory."""
    return {
        name: value
        for file in sorted(directory.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def sent(
    engine: InferenceEngine,
    meta: WeightUpdateMeta,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> None:
    """Update ``engine`` with ``tensors``; raises what the update ends with."""
    arrival = engine.update_weights(meta)
    try:
        send_tensors(iter(tensors.items() if isinstance(tensors, Mapping) else tensors), meta)
    except WeightsError:
        # The receiver knows better why.
        arrival.result(CALL_TIMEOUT_S)
        raise
    arrival.result(CALL_TIMEOUT_S)
