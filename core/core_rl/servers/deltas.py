"""Delta weight sync to servers: changes come to this process, and servers load full weights from its copy."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.backend.tensors import check_shapes
from core_rl.checkpoint.manifest import MANIFEST
from core_rl.checkpoint.tensor_files import write_tensors
from core_rl.engine.delta_files import open_delta_update
from core_rl.servers.adapters import ServedModel
from core_rl.servers.weights import BroadcastWeights, DiskWeights, TensorWeights, Weights
from core_rl.weight_sync.buckets import Filling
from core_rl.weight_sync.delta import DeltaDecoder, DeltaWeights
from core_rl.weight_sync.messages import Bucket
from core_rl.weight_sync.update import weight_update

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", MANIFEST)


class ReceivedChanges:
    """Weights of the previous update with ``delta``, in the host memory of this process; see `DeltaDecoder`.

    By ``tensor`` and ``distributed`` they are the buckets that replaced servers load, and cost no more memory.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._decoder = DeltaDecoder()

    def forget(self) -> None:
        """Free the weights: the next update has to be full."""
        self._decoder.forget()

    def receive(self, meta: WeightUpdateMeta, timeout_s: float, install: Callable[[Weights], None]) -> None:
        """Have servers ``install`` the weights of an update by ``meta``.

        Raises `DeltaRefused`, and `WeightsError` for other names or shapes than the model's.
        """
        if meta.method == "disk":
            with open_delta_update(meta) as update:
                received = self._decoded(update.items())
                full = update.is_full
            install(DiskWeights.checked(meta, self._model.shapes) if full else self._written(received, meta))
        else:
            with weight_update(meta, base=self._decoder.base).receive(timeout_s) as buckets:
                items = ((name, tensor.clone()) for bucket in buckets for name, tensor in bucket)
                received = self._decoded(items)
                shared = _buckets(received, meta.bucket_bytes)
                received = replace(received, tensors=dict(item for bucket in shared for item in bucket))
                kind = BroadcastWeights if meta.method == "distributed" else TensorWeights
                install(kind.arrived(meta.version, shared))
        self._decoder.commit(received, meta.version)

    def _decoded(self, items: Iterator[tuple[str, Tensor]]) -> DeltaWeights:
        received = self._decoder.decode(items)
        shapes = {name: tuple(tensor.shape) for name, tensor in received.tensors.items()}
        check_shapes(shapes, self._model.shapes, "the weights that were sent")
        return received

    def _written(self, received: DeltaWeights, meta: WeightUpdateMeta) -> DiskWeights:
        """A model directory with the weights, next to the update: servers see that place."""
        path = Path(meta.path or "")
        directory = Path(tempfile.mkdtemp(prefix=f".{path.name}.served-", dir=path.parent))
        weights = DiskWeights(directory, meta.version, temporary=True)
        try:
            ignored = shutil.ignore_patterns(*WEIGHT_FILES)
            shutil.copytree(self._model.path, directory, ignore=ignored, dirs_exist_ok=True)
            write_tensors(directory, "model", received.tensors.items(), writes=True)
        except BaseException:
            weights.discard()
            raise
        return weights


def _buckets(received: DeltaWeights, bucket_bytes: int) -> list[Bucket]:
    """All tensors in buckets of shared memory."""
    fillings = [Filling(bucket_bytes, torch.device("cpu"))]
    for name, tensor in received.tensors.items():
        if not fillings[-1].fits(tensor):
            fillings.append(Filling(bucket_bytes, torch.device("cpu")))
        fillings[-1].add(name, tensor)
    return [filling.tensors for filling in fillings]
