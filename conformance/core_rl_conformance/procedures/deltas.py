"""The other end of a delta weight sync: a sender and a receiver that are no engines."""

from __future__ import annotations

import math
import shutil
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.backend.tensors import NamedTensors
from core_rl.checkpoint.directory import write_checkpoint
from core_rl.checkpoint.tensor_files import write_tensors
from core_rl.distributed.comm import Comm
from core_rl.engine.delta_files import write_changes
from core_rl.engine.sync import abandon_until_done
from core_rl.launch.group import EngineGroup
from core_rl.weight_sync.delta import BASE, DIGEST, DeltaDecoder, DeltaEncoder
from core_rl.weight_sync.update import weight_update
from core_rl_conformance.expected_values import Snapshot
from core_rl_conformance.pools import CALL_TIMEOUT_S
from core_rl_conformance.procedures.streaming import tensors_of


class DeltaSender:
    """Sends ``tensors`` by any method as a train engine does; others of the directory's files go along by ``disk``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.tensors = tensors_of(directory)
        self.changes = DeltaEncoder()
        self.full_updates = 0
        self.spoils_digest = False

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the tensors, or their changes since the last update; returns when they are sent."""
        if meta.rebase:
            self.changes.forget()
        base = self.changes.base
        self.full_updates += base is None
        if meta.method != "disk":
            weight_update(meta, base=base).send(self._encoded())
        elif base is None:
            write_checkpoint(meta.path or "", self._write_model, Comm(), kind="hf")
        else:
            write_changes(meta.path or "", self._encoded(), Comm(), is_writer=True)
        self.changes.commit(meta.version)

    def skip(self, version: int) -> None:
        """Send an update that no receiver gets."""
        deque(self._encoded(), maxlen=0)
        self.changes.commit(version)

    def _encoded(self) -> NamedTensors:
        for name, tensor in self.changes.encode(self.tensors.items()):
            yield name, _spoiled(tensor) if name == DIGEST and self.spoils_digest else tensor

    def _write_model(self, directory: Path) -> None:
        for file in self._directory.iterdir():
            if not file.name.startswith("model"):
                shutil.copy(file, directory)
        write_tensors(directory, "model", self.changes.recorded(self.tensors.items()), writes=True)

    def snapshot(self, path: Path) -> Snapshot:
        """The present tensors in the directory ``path``, to expect values of."""
        path.mkdir()
        for file in self._directory.iterdir():
            if not file.name.startswith("model"):
                shutil.copy(file, path)
        write_tensors(path, "model", self.tensors.items(), writes=True)
        return Snapshot(path)


def _spoiled(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.flip(0)


def with_few_changes(tensors: Mapping[str, Tensor], seed: int, share: float = 0.03) -> dict[str, Tensor]:
    """Copies with other values in a ``share`` of the places of each tensor, the last one among them."""
    draw = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in tensors.items():
        new = tensor.clone()
        mask = torch.rand(tensor.numel(), generator=draw) < share
        mask[-1:] = True
        values = torch.rand(int(mask.sum()), generator=draw) - 0.5
        values[::2] *= 1e-3  # a difference to the old value rounds these
        new.view(-1)[mask] = values.to(tensor.dtype)
        changed[name] = new
    return changed


@dataclass(frozen=True, kw_only=True)
class ArrivedChanges:
    """An update of a train engine with ``delta``, as a receiver gets it."""

    is_full: bool
    """Whether it needs no earlier update."""
    changed: frozenset[str]
    """Names of the tensors that came."""
    nbytes: int
    """Bytes that came."""
    tensors: Mapping[str, Tensor]
    """All weights afterwards."""


def arrived(
    group: EngineGroup, meta: WeightUpdateMeta, decoder: DeltaDecoder, error: Exception | None = None
) -> ArrivedChanges:
    """The update that ``group`` uploads to a receiver with ``decoder``, which fails with ``error`` at its end."""
    with ThreadPoolExecutor(1) as pool:
        future: Future[ArrivedChanges] = pool.submit(_receive, meta, decoder, error)
        try:
            group.upload_weights(meta)
        finally:
            # A sender that failed before it connected leaves the receiver waiting.
            abandon_until_done(meta, future, math.inf)
        return future.result()


def _receive(meta: WeightUpdateMeta, decoder: DeltaDecoder, error: Exception | None) -> ArrivedChanges:
    with weight_update(meta, base=decoder.base).receive_copies(CALL_TIMEOUT_S) as buckets:
        items = dict(item for bucket in buckets for item in bucket)
        weights = decoder.decode(items.items())
        if error is not None:
            raise error
        decoder.commit(weights, meta.version)
    return ArrivedChanges(
        is_full=BASE not in items,
        changed=weights.changed,
        nbytes=sum(tensor.nbytes for name, tensor in items.items() if name not in (BASE, DIGEST)),
        tensors=weights.tensors,
    )
