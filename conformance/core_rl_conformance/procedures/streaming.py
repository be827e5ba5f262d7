"""The other end of a weight sync by any method but ``disk``: a receiver and a sender that are no engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from core_rl.backend.meta import SyncMethod, WeightUpdateMeta
from core_rl.config.capability import Capability
from core_rl.engine.inference import InferenceEngine
from core_rl.engine.sync import abandon_until_done
from core_rl.errors import WeightsError
from core_rl.launch.group import EngineGroup
from core_rl.weight_sync.delta import DeltaBase
from core_rl.weight_sync.messages import AdapterMetadata, Bucket
from core_rl.weight_sync.update import weight_update
from core_rl_conformance.engine_under_test import EngineUnderTest
from core_rl_conformance.pools import CALL_TIMEOUT_S

NOISE = 77
"""No weight of a tiny model; finite, so that messages show it."""
LARGE_BUCKET = 1 << 28
"""All weights of a tiny model fit."""

METHODS: Mapping[SyncMethod, Capability] = {
    "disk": Capability.SYNC_DISK,
    "tensor": Capability.SYNC_TENSOR,
    "distributed": Capability.SYNC_DISTRIBUTED,
}
"""Ways to send all weights."""


def methods_of(subject: EngineUnderTest) -> list[SyncMethod]:
    """The declared ways to send all weights."""
    return [method for method, needed in METHODS.items() if subject.spec.supports(needed)]


def sync_meta(
    subject: EngineUnderTest, method: SyncMethod, version: int, bucket_bytes: int, verify: bool = False
) -> WeightUpdateMeta:
    """An update with a rendezvous of its own."""
    point = str(subject.directory(f"meeting-{version}"))
    return WeightUpdateMeta(
        method=method, version=version, path=point, bucket_bytes=bucket_bytes, verify=verify
    )


@dataclass(frozen=True, kw_only=True)
class Caught:
    """The tensors and metadata that a sender sent."""

    tensors: dict[str, Tensor]
    buckets: tuple[tuple[str, ...], ...]
    """The names in each bucket."""
    sizes: tuple[int, ...]
    """Bytes of the tensors of each bucket."""
    adapter: AdapterMetadata | None = None
    """Metadata of the sent adapter."""


def caught(
    group: EngineGroup, meta: WeightUpdateMeta, base: DeltaBase | None = None, error: Exception | None = None
) -> Caught:
    """The tensors that ``group`` uploads with ``meta`` to a receiver of weights ``base``, which ends with ``error``."""
    with ThreadPoolExecutor(1) as pool:
        future: Future[Caught] = pool.submit(_catch, meta, base, error)
        try:
            group.upload_weights(meta)
        finally:
            # A sender that failed before it connected leaves the receiver waiting.
            abandon_until_done(meta, future, math.inf)
        return future.result()


def _catch(meta: WeightUpdateMeta, base: DeltaBase | None, error: Exception | None) -> Caught:
    update = weight_update(meta, base=base)
    if meta.method == "distributed":
        with update.receive_copies(CALL_TIMEOUT_S) as buckets:
            return _as_caught(list(buckets), None)
    with update.receive(CALL_TIMEOUT_S) as received:
        # Copied when the last bucket has come: a sender that uses memory again has done so by then.
        copies = [[(name, tensor.clone()) for name, tensor in bucket] for bucket in list(received)]
        if error is not None:
            raise error
        return _as_caught(copies, received.adapter)


def _as_caught(buckets: list[Bucket], adapter: AdapterMetadata | None) -> Caught:
    return Caught(
        adapter=adapter,
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
    adapter: AdapterMetadata | None = None,
    *,
    overwrite: bool = True,
) -> None:
    """Update ``engine`` with ``tensors``, by ``lora`` the factors of ``adapter``; raises the error of the update.

    With ``overwrite`` the memory that was sent is overwritten when the update has ended: weights may be no views of it.
    Engines of servers keep it, to load it again.
    """
    buckets: list[Bucket] = []
    stream = iter(tensors.items() if isinstance(tensors, Mapping) else tensors)
    send = partial(weight_update(meta, adapter).send, stream, on_bucket=buckets.append if overwrite else None)
    try:
        delivered(engine, meta, send)
    finally:
        for _, tensor in (item for bucket in buckets for item in bucket):
            tensor.fill_(NOISE)


def delivered(engine: InferenceEngine, meta: WeightUpdateMeta, send: Callable[[], None]) -> None:
    """Have ``engine`` take the update that ``send`` sends; raises the error of the receiver, or else of the sender."""
    arrival = engine.update_weights(meta)
    try:
        send()
    except WeightsError:
        arrival.result(CALL_TIMEOUT_S)  # the receiver knows better why
        raise
    finally:
        wait([arrival], CALL_TIMEOUT_S)
    arrival.result(CALL_TIMEOUT_S)
