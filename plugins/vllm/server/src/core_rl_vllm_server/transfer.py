"""Weights from buckets of shared memory, as core-rl's engine `vllm` sends them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_storage_filename
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

__all__ = ["Bucket", "BucketTransferEngine"]


@dataclass
class Init(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is in another environment
    """There is nothing to initialize."""


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One piece of shared memory, which the sender has counted this process as a reader of."""

    manager: str
    """The socket of torch's process that owns the name."""
    handle: str
    """The name."""
    size: int
    """Bytes."""
    tensors: list[tuple[str, str, list[int], int]]
    """Name, dtype, shape and first byte of each tensor."""


class BucketTransferEngine(WeightTransferEngine[Init, Bucket]):  # type: ignore[misc]
    """Loads buckets, whatever in the update has come before."""

    init_info_cls = Init
    update_info_cls = Bucket
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Init) -> None:
        """Nothing: every bucket says where it is."""

    def start_weight_update(self) -> None:
        """Weights are loaded layer by layer; each one is processed when all of it has come."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket; after an error, what is left of an update that broke off is removed."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            # Weights that were kept for half of a layer would be taken for those of the next update.
            finalize_layerwise_reload(self.model, self.model_config)
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Bucket) -> None:
        """Load one bucket. Its memory stays open as long as a tensor of it is needed."""
        storage = rebuild_storage_filename(
            torch.UntypedStorage, update_info.manager.encode(), update_info.handle.encode(), update_info.size
        )
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.model.load_weights(
            (name, _view(flat, dtype, shape, start)) for name, dtype, shape, start in update_info.tensors
        )

    def finish_weight_update(self) -> None:
        """Process layers that are not whole yet; those that got nothing keep what they have."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""


def _view(flat: Tensor, dtype: str, shape: list[int], start: int) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    count = 1
    for size in shape:
        count *= size
    return flat[start : start + count * kind.itemsize].view(kind).view(shape)
