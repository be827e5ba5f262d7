"""The ranks of an FSDP engine, as device meshes and as groups.

Ranks are counted with tensor parallel ranks next to each other, then context parallel ones, then data
parallel ones. Weights are sharded over data and context parallel ranks alike: each of them has
gradients of other tokens. With several replicas (hybrid sharding), each has a whole copy, and the
ranks of one copy are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core_rl.config.layout import ParallelLayout
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.errors import LayoutError
from core_rl.toolkit.parallel_context import ModelShards

__all__ = ["Meshes"]

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"


@dataclass(frozen=True)
class Meshes:
    """All meshes and groups of an engine. Making one is collective, and so is the first use of each property."""

    world: Comm
    layout: ParallelLayout
    replicas: int

    @staticmethod
    def of(world: Comm, layout: ParallelLayout, replicas: int) -> Meshes:
        """Meshes shared with an engine of this process that has equal ones: each group costs connections and memory."""
        meshes = Meshes(world, layout, replicas)
        found: Meshes = world.shared.setdefault((Meshes, layout, replicas, world.device), meshes)
        return found

    def __post_init__(self) -> None:
        if self.layout.dp % self.replicas:
            raise LayoutError(
                f"options.replicas={self.replicas} must divide dp={self.layout.dp}: each copy of the weights is "
                "sharded over dp / replicas ranks; change one of them"
            )

    @cached_property
    def weights(self) -> DeviceMesh:
        """``[replicate, shard, tensor]``: how weights are spread."""
        sizes = (self.replicas, self.layout.dp // self.replicas * self.layout.cp, self.layout.tp)
        return init_device_mesh(self.world.device.type, sizes, mesh_dim_names=(REPLICATE, SHARD, TENSOR))

    @property
    def data(self) -> DeviceMesh:
        """Mesh over which FSDP shards; two dimensions for hybrid sharding."""
        return self.weights[REPLICATE, SHARD] if self.replicas > 1 else self.weights[SHARD]

    @property
    def tensor(self) -> DeviceMesh:
        """The tensor parallel ranks."""
        return self.weights[TENSOR]

    @cached_property
    def groups(self) -> RankGroups:
        """Groups of ranks with different sequences, and of ranks with the same."""
        size = self.layout.cp * self.layout.tp
        if size == 1:
            return RankGroups(data_parallel=self.world)
        mesh = self._mesh((self.layout.dp, size), ("data", "model"))
        return RankGroups(data_parallel=self._world(mesh, "data"), model_parallel=self._world(mesh, "model"))

    @cached_property
    def shards(self) -> ModelShards:
        """Distribution of one copy of the model and of its tokens."""
        if self.layout.cp * self.layout.tp == 1:
            return ModelShards()
        mesh = self._mesh((self.layout.dp, self.layout.cp, self.layout.tp), ("data", "context", TENSOR))
        return ModelShards(
            context=self._world(mesh, "context"),
            tensor=self._world(mesh, TENSOR),
            sequence_parallel=self.layout.sequence_parallel,
        )

    def _mesh(self, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        return init_device_mesh(self.world.device.type, sizes, mesh_dim_names=names)

    def _world(self, mesh: DeviceMesh, name: str) -> Comm:
        """The ranks along one dimension; a lone rank needs no group."""
        if mesh[name].size() == 1:
            return Comm(device=self.world.device)
        return Comm(mesh.get_group(name), self.world.device)
