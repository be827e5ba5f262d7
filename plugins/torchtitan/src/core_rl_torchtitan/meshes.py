"""The ranks of a torchtitan engine: its `ParallelDims`, and the groups that the core asks for."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchtitan.distributed import ParallelDims

from core_rl.config.layout import ParallelLayout
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.errors import LayoutError
from core_rl.toolkit.parallel_context import ModelShards
from core_rl_torchtitan.process_settings import device_type


def check_copies(layout: ParallelLayout, replicas: int) -> None:
    """Raise `LayoutError` where ``layout`` has no room for ``replicas`` copies of the weights."""
    if layout.dp % replicas:
        raise LayoutError(
            f"options.replicas={replicas} must divide dp={layout.dp}: each copy of the weights is sharded over "
            "dp / replicas ranks; change either"
        )
    ranks = layout.dp // replicas * layout.cp
    if ranks % layout.ep:
        raise LayoutError(
            f"ep={layout.ep} must divide dp / replicas * cp = {ranks}: experts are spread over the ranks that share "
            "one copy of the weights; change either"
        )


@dataclass(frozen=True, eq=False)
class Meshes:
    """All meshes and groups of an engine."""

    dims: ParallelDims
    groups: RankGroups
    shards: ModelShards
    """Distribution of one copy of the model and of its tokens."""

    @property
    def experts(self) -> DeviceMesh | None:
        """The ranks with the same experts; None without expert parallelism."""
        names = ["dp_replicate", "efsdp"] if self.dims.dp_replicate_enabled else ["efsdp"]
        mesh: DeviceMesh | None = self.dims.get_optional_mesh(names)
        return mesh

    @staticmethod
    def join(world: Comm, layout: ParallelLayout, replicas: int) -> Meshes:
        """Meshes of ``layout``, shared with the engines of this process that have equal ones; collective.

        They live as long as the world: DTensor caches meshes by value, and torchtitan gives its own no unique names.
        """
        check_copies(layout, replicas)
        key = (Meshes, layout, replicas, world.device)
        if key not in world.shared:
            world.shared[key] = _made(world, layout, replicas)
        meshes: Meshes = world.shared[key]
        return meshes


def _made(world: Comm, layout: ParallelLayout, replicas: int) -> Meshes:
    dims = ParallelDims(
        dp_replicate=replicas,
        dp_shard=layout.dp // replicas,
        cp=layout.cp,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        world_size=layout.world_size,
        spmd_backend="partial_dtensor",
    )
    with device_type(world.device.type):
        dims.build_mesh()

    def ranks(name: str) -> Comm:
        mesh = dims.get_optional_mesh(name)
        return Comm(None if mesh is None else mesh.get_group(), world.device)

    shards = ModelShards(context=ranks("cp"), tensor=ranks("tp"), sequence_parallel=layout.sequence_parallel)
    size = layout.cp * layout.tp
    if size == 1:
        return Meshes(dims, RankGroups(data_parallel=world), shards)
    mesh = init_device_mesh(world.device.type, (layout.dp, size), mesh_dim_names=("data", "model"))
    data, model = (Comm(mesh.get_group(name), world.device) for name in ("data", "model"))
    return Meshes(dims, RankGroups(data_parallel=data, model_parallel=model), shards)
