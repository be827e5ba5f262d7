"""The process group that rank 0 of a trainer broadcasts weights in."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # public as torch.distributed.TCPStore, and not for mypy
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

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
            address.host,
            address.port,
            address.world_size,
            is_master=False,
            timeout=timedelta(seconds=JOIN_S),
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
