"""Weights from buckets of shared memory or from a process group, as core-rl's engine `vllm` sends them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # public as torch.distributed.TCPStore, and not for mypy
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.multiprocessing.reductions import rebuild_cuda_tensor, rebuild_storage_filename
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

JOIN_S = 60.0
"""The longest wait for ranks to join."""
BROADCAST_S = 300.0
"""The longest time of one broadcast."""


@dataclass
class GroupAddress:
    """Address and ranks of a group."""

    name: str
    host: str
    port: int
    world_size: int
    rank_offset: int
    """The rank of the first process of this server."""
    backend: str
    """``gloo`` or ``nccl``."""


class Group:
    """One rank of the group, under the keys that `torch.distributed` would use for its name."""

    def __init__(self, address: GroupAddress, rank: int, device: torch.device) -> None:
        """``rank`` is counted from that of the server's first process; returns when all ranks have joined."""
        self._device = torch.device("cpu") if address.backend == "gloo" else device
        limit, rank = timedelta(seconds=BROADCAST_S), address.rank_offset + rank
        store: Store = TCPStore(
            address.host, address.port, address.world_size, is_master=False, timeout=timedelta(seconds=JOIN_S)
        )
        for prefix in (address.name, f"{address.name}/", f"{self._device.type}/"):
            store = PrefixStore(prefix, store)
        self._group: Any  # torch's stubs leave out a backend's collectives
        if address.backend == "gloo":
            self._group = ProcessGroupGloo(store, rank, address.world_size, limit)
            return
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = limit
        self._group = ProcessGroupNCCL(store, rank, address.world_size, options)

    def receive(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """The next tensor that rank 0 sends."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._group.broadcast(tensor, root=0).wait()
        return tensor

    def leave(self) -> None:
        """Ranks that wait for this one get an error."""
        if self._device.type == "cuda":
            self._group.abort()
        del self._group


@dataclass
class Join(GroupAddress, WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is in another environment
    """The group that the next update comes by; one by shared memory needs none."""


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One piece of memory, which the sender has counted this process as a reader of, or of broadcasts."""

    tensors: list[tuple[str, str, list[int], int]]
    """Name, dtype, shape and first byte of each tensor."""
    manager: str = ""
    """The socket of torch's process that owns the name."""
    handle: str = ""
    """The name of shared memory; empty for other tensors."""
    opening: list[Any] = field(default_factory=list)
    """Memory of a GPU: the arguments of torch's ``rebuild_cuda_tensor`` from the UUID on, with bytes in hexadecimal."""
    size: int = 0
    """Bytes."""


class BucketTransferEngine(WeightTransferEngine[Join, Bucket]):  # type: ignore[misc]
    """Loads buckets, whatever in the update has come before."""

    init_info_cls = Join
    update_info_cls = Bucket
    supports_draft_weight_update = False
    group: Group | None = None

    def init_transfer_engine(self, init_info: Join) -> None:
        """Join a group, and leave the previous group."""
        self.shutdown()
        self.group = Group(init_info, self.parallel_config.rank, self.device)

    def start_weight_update(self) -> None:
        """Weights are loaded layer by layer; each one is processed when all of it has come."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket; after an error, leftovers of a broken update are removed."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            # Weights that were kept for half of a layer would be taken for those of the next update.
            finalize_layerwise_reload(self.model, self.model_config)
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Bucket) -> None:
        if update_info.handle or update_info.opening:
            flat = _shared(update_info) if update_info.handle else _on_gpu(update_info)
            self.model.load_weights(_views(flat, update_info))
        else:
            self.model.load_weights(self._broadcast(update_info))

    def _broadcast(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        if self.group is None:
            raise RuntimeError("weights are to be broadcast, and this server is in no group")
        for name, dtype, shape, _ in bucket.tensors:
            yield name, self.group.receive(shape, getattr(torch, dtype))

    def finish_weight_update(self) -> None:
        """Process incomplete layers; layers without new weights keep theirs."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.leave()


def _shared(bucket: Bucket) -> Tensor:
    """Shared memory as a tensor [size] of uint8."""
    storage = rebuild_storage_filename(
        torch.UntypedStorage, bucket.manager.encode(), bucket.handle.encode(), bucket.size
    )
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _on_gpu(bucket: Bucket) -> Tensor:
    """Memory of a trainer's GPU as a tensor [size] of uint8; raises ``ValueError`` where this process lacks the GPU."""
    uuid, handle, size, start, gradient, counter, counter_start, event, waits = bucket.opening
    gpus = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    place = (gpus.index(uuid), bytes.fromhex(handle), size, start, gradient)
    sharing = (bytes.fromhex(counter), counter_start, bytes.fromhex(event), waits)
    shape, storage = torch.Size([bucket.size]), torch.storage.TypedStorage
    flat: Tensor = rebuild_cuda_tensor(Tensor, shape, (1,), 0, storage, torch.uint8, *place, *sharing)
    return flat


def _views(flat: Tensor, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``bucket`` in ``flat``, which stays open as long as any is needed."""
    for name, dtype, shape, start in bucket.tensors:
        kind: torch.dtype = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        yield name, flat[start : start + count * kind.itemsize].view(kind).view(shape)
