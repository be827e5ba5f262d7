"""Many ranks in one process: their states are on the meta device, and a communicator records their sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from core_rl.backend.tensors import ShardedState
from core_rl.distributed.comm import Comm
from core_rl.errors import EngineContractError
from core_rl.state.gather import Gather
from core_rl.state.slices import Placements, gather_placements
from core_rl.toolkit.hf_state import HFShardedState

T = TypeVar("T")
Cut = Callable[[str], list[Placement]]
"""The placements of a parameter over the dimensions of a mesh, by its name."""


@dataclass(frozen=True)
class Recorder(Comm):
    """Rank ``number`` of ``count``; tensors gathered so far, by rank, are in ``heard``."""

    number: int = 0
    count: int = 1
    heard: dict[int, list[Any]] = field(default_factory=dict)
    calls: list[int] = field(default_factory=lambda: [0])

    @property
    def rank(self) -> int:
        return self.number

    @property
    def size(self) -> int:
        return self.count

    def gather(self, value: T) -> list[T]:
        """The values of the ranks that came here before, and for the others this rank's own."""
        answers = self.heard.setdefault(self.calls[0], [None] * self.count)
        self.calls[0] += 1
        answers[self.number] = value
        return [value if answer is None else answer for answer in answers]


@dataclass
class Traffic:
    """Bytes by rank."""

    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)
    largest: int = 0
    """The largest message."""


def whole_model(config: Mapping[str, Any]) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=torch.bfloat16
        )
    return model


@contextmanager
def _as_rank(rank: int, sizes: tuple[int, ...]) -> Iterator[DeviceMesh]:
    world = torch.Size(sizes).numel()
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        # DTensor's caches take the mesh of another rank for this one, unless its names differ.
        names = tuple(f"{number} of rank {rank}" for number in range(len(sizes)))
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def _cut(model: PreTrainedModel, whole: Mapping[str, Tensor], mesh: DeviceMesh, cut: Cut) -> None:
    """Replace each parameter by this rank's part, as FSDP and tensor parallelism cut it."""
    for name, tensor in whole.items():
        local, places = tensor, cut(name)
        for dimension, place in enumerate(places):
            if isinstance(place, Shard):
                parts = local.chunk(mesh.size(dimension), place.dim)
                number = mesh.get_local_rank(dimension)
                local = parts[number] if number < len(parts) else local.narrow(place.dim, 0, 0)
        part = DTensor.from_local(
            local, mesh, places, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, nn.Parameter(part))


def export_traffic(model: PreTrainedModel, sizes: tuple[int, ...], cut: Cut) -> Traffic:
    """The bytes that an export of ``model``, cut over a mesh of ``sizes``, moves to rank 0."""
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}

    @contextmanager
    def state_of(comm: Recorder) -> Iterator[ShardedState]:
        with _as_rank(comm.rank, sizes) as mesh:
            _cut(model, whole, mesh, cut)
            yield HFShardedState(model, None, {}, comm)

    return recorded_traffic(torch.Size(sizes).numel(), state_of)


def recorded_traffic(
    world: int, state_of: Callable[[Recorder], AbstractContextManager[ShardedState]]
) -> Traffic:
    """The bytes that an export of the states of ``world`` ranks, made in turn, moves to rank 0."""
    heard = dict[int, list[Any]]()
    slices, comms = [], []
    for rank in range(world):
        comm = Recorder(None, torch.device("meta"), number=rank, count=world, heard=heard)
        with state_of(comm) as state:
            slices.append(list(state.local("params")))
            comms.append(comm)
            # The last rank hears all of the others; before that, boxes are missing.
            with nullcontext() if rank == world - 1 else suppress(EngineContractError):
                placed = gather_placements(state, "params", comm)
    return _streamed(comms, slices, placed)


def _streamed(comms: list[Recorder], slices: list[list[Any]], placed: Placements) -> Traffic:
    traffic = Traffic()

    def send(rank: int, message: Tensor, **_: object) -> None:
        traffic.sent[rank] += message.nbytes
        traffic.largest = max(traffic.largest, message.nbytes)

    def receive(rank: int, message: Tensor, **_: object) -> None:
        traffic.received[rank] += message.nbytes

    for comm, own in zip(comms, slices, strict=True):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("core_rl.state.gather.dist.send", partial(send, comm.rank))
            patched.setattr("core_rl.state.gather.dist.recv", partial(receive, comm.rank))
            gather = Gather(world=comm, writer=0)
            for _ in gather.stream(placed, own):
                pass
    return traffic


def sharded(name: str) -> list[Placement]:
    """FSDP over all ranks."""
    return [Shard(0)]


def hybrid(name: str) -> list[Placement]:
    """FSDP inside each machine, a copy on each."""
    return [Replicate(), Shard(0)]


def experts_apart(name: str) -> list[Placement]:
    """Expert parallelism: each rank of a group has other experts, and all have everything else."""
    return [Replicate(), Shard(0) if ".experts." in name else Replicate()]
