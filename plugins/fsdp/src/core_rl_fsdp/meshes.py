"""The ranks of an FSDP engine, as device meshes and as groups.

Ranks are counted with tensor parallel ranks next to each other, then context parallel ones, then data
parallel ones. Weights are sharded over data and context parallel ranks alike: each of them has
gradients of other tokens. With several replicas (hybrid sharding), each has a whole copy, and the
ranks of one copy are neighbours. Among these, expert parallel ranks are neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core_rl.config.layout import ParallelLayout
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.toolkit.fully_sharded import check_copies
from core_rl.toolkit.parallel_context import ModelShards

REPLICATE, SHARD, TENSOR, EXPERT = "replicate", "shard", "tensor", "expert"


@dataclass(eq=False)
class Meshes:
    """All meshes and groups of an engine. Making one is collective, and so is the first use of each property."""

    world: Comm
    layout: ParallelLayout
    replicas: int
    _engines: int = field(default=0, init=False)
    """Engines of this process that use them."""
    _made: list[DeviceMesh] = field(default_factory=list, init=False)
    _unique: str = field(default_factory=lambda: uuid4().hex, init=False)
    """A part of the names of dimensions. DTensor caches meshes, and takes an equal but older one, whose groups may be
    destroyed, for a new one; names count in the comparison."""

    @staticmethod
    def join(world: Comm, layout: ParallelLayout, replicas: int) -> Meshes:
        """Meshes shared with the engines of this process that have equal ones: each group has connections and threads.

        Each engine calls `leave`.
        """
        meshes = Meshes(world, layout, replicas)
        shared: Meshes = world.shared.setdefault(meshes._key, meshes)
        shared._engines += 1
        return shared

    def leave(self) -> None:
        """The inverse of `join`: the last engine destroys the groups, which would live as long as the world. Local."""
        self._engines -= 1
        if self._engines:
            return
        self.world.shared.pop(self._key, None)
        if not dist.is_initialized() or dist.group.WORLD is not self.world.group:
            return  # the world was destroyed, and its groups with it
        for group in {group for mesh in self._made for group in mesh.get_all_groups()} - {self.world.group}:
            dist.destroy_process_group(group)
        for mesh in self._made:
            # DTensor's caches keep meshes for ever, and a mesh of recent torch keeps its groups, with their threads.
            getattr(mesh, "_pg_registry", {}).clear()

    @property
    def _key(self) -> tuple[object, ...]:
        return (Meshes, self.layout, self.replicas, self.world.device)

    def __post_init__(self) -> None:
        check_copies(self.layout, self.replicas)

    @property
    def _ranks_of_one_copy(self) -> int:
        """Ranks over which each weight is sharded."""
        return self.layout.dp // self.replicas * self.layout.cp

    @cached_property
    def weights(self) -> DeviceMesh:
        """The mesh over which weights are spread: its dimensions replicate, shard, and are tensor parallel."""
        sizes = {REPLICATE: self.replicas, SHARD: self._ranks_of_one_copy, TENSOR: self.layout.tp}
        return self._mesh(sizes)

    @property
    def data(self) -> DeviceMesh:
        """Mesh over which FSDP shards; two dimensions for hybrid sharding."""
        return self._data_of(self.weights)

    @property
    def tensor(self) -> DeviceMesh:
        return self.weights[self._name(TENSOR)]

    @cached_property
    def _with_experts(self) -> DeviceMesh:
        """The ranks of `weights`, with ranks of different experts next to each other."""
        shard = self._ranks_of_one_copy // self.layout.ep
        return self._mesh({REPLICATE: self.replicas, SHARD: shard, EXPERT: self.layout.ep})

    @property
    def expert_data(self) -> DeviceMesh | None:
        """Mesh over which FSDP shards experts, the ranks with the same ones; None without expert parallelism."""
        return self._data_of(self._with_experts) if self.layout.ep > 1 else None

    @property
    def expert(self) -> DeviceMesh:
        """The expert parallel ranks."""
        return self._with_experts[self._name(EXPERT)]

    @property
    def expert_ranks(self) -> Comm:
        """The same as a group."""
        return self._world(self._with_experts, EXPERT)

    def _data_of(self, mesh: DeviceMesh) -> DeviceMesh:
        names = (REPLICATE, SHARD) if self.replicas > 1 else (SHARD,)
        return mesh[tuple(map(self._name, names))]

    @cached_property
    def groups(self) -> RankGroups:
        """Groups of ranks with different sequences, and of ranks with the same."""
        size = self.layout.cp * self.layout.tp
        if size == 1:
            return RankGroups(data_parallel=self.world)
        mesh = self._mesh({"data": self.layout.dp, "model": size})
        return RankGroups(data_parallel=self._world(mesh, "data"), model_parallel=self._world(mesh, "model"))

    @cached_property
    def shards(self) -> ModelShards:
        """Distribution of one copy of the model and of its tokens."""
        if self.layout.cp * self.layout.tp == 1:
            return ModelShards()
        mesh = self._mesh({"data": self.layout.dp, "context": self.layout.cp, TENSOR: self.layout.tp})
        return ModelShards(
            context=self._world(mesh, "context"),
            tensor=self._world(mesh, TENSOR),
            sequence_parallel=self.layout.sequence_parallel,
        )

    def _mesh(self, sizes: Mapping[str, int]) -> DeviceMesh:
        """A mesh without the dimensions of one rank, each of which would cost a group; FSDP always needs ``shard``."""
        used = {self._name(name): size for name, size in sizes.items() if size > 1 or name == SHARD}
        mesh = init_device_mesh(self.world.device.type, tuple(used.values()), mesh_dim_names=tuple(used))
        self._made.append(mesh)
        return mesh

    def _world(self, mesh: DeviceMesh, name: str) -> Comm:
        """The ranks along one dimension; a lone rank needs no group."""
        if self._name(name) not in (mesh.mesh_dim_names or ()):
            return Comm(device=self.world.device)
        return Comm(mesh.get_group(self._name(name)), self.world.device)

    def _name(self, dimension: str) -> str:
        return f"{dimension}_{self._unique}"
