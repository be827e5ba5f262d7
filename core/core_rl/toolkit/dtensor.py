"""Local parts of tensors, plain or `DTensor`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from core_rl.backend.tensors import box_region
from core_rl.errors import UnsupportedCapability


@dataclass(frozen=True)
class LocalPart:
    """The part of a tensor on this rank, and its first element in the full tensor."""

    tensor: Tensor
    offsets: tuple[int, ...]

    @property
    def region(self) -> tuple[slice, ...]:
        """The part as slices of the full tensor."""
        return box_region(self.offsets, self.tensor.shape)


def local_part(tensor: Tensor) -> LocalPart:
    """This rank's part of ``tensor``, as a view of its memory without a graph; all of a plain tensor.

    A `DTensor` may be sharded over several dimensions of its mesh, also along the same dimension of the tensor, as by
    FSDP over tensor parallelism. Raises `UnsupportedCapability` for partial sums.
    """
    if not isinstance(tensor, DTensor):
        return LocalPart(tensor.detach(), (0,) * tensor.dim())
    bounds = [(0, size) for size in tensor.shape]
    mesh = tensor.device_mesh
    # Not `get_local_rank`, which asks the mesh's groups: DTensor's caches may give an equal mesh whose groups are gone.
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # a rank has parameters on meshes of its own
    # A strided shard, such as FSDP's, cuts the remainder of the mesh dimensions on its right.
    cut = [axis for axis in range(mesh.ndim) if _cut_dim(tensor.placements[axis]) is not None]
    strided = [axis for axis in cut if type(tensor.placements[axis]) is not Shard]
    plain = [axis for axis in range(mesh.ndim) if axis not in strided]
    for axis in (*plain, *reversed(strided)):
        placement = tensor.placements[axis]
        if isinstance(placement, Partial):
            raise UnsupportedCapability(
                f"a tensor {list(tensor.shape)} is a partial sum over {mesh}; reduce it"
            )
        dim = _cut_dim(placement)
        if dim is not None:
            start, stop = bounds[dim]
            size = -(-(stop - start) // mesh.size(axis))  # as of `torch.chunk`: the last parts may be smaller
            first = start + size * coordinate[axis]
            bounds[dim] = min(stop, first), min(stop, first + size)
    with torch.no_grad():  # the tensor inside, without a dispatch
        return LocalPart(tensor.to_local(), tuple(start for start, _ in bounds))


def own_part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, with its graph."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Shard a parameter of ``module``, equal on all ranks, along ``dim``; no collective. Nothing where it has none."""
    parameter = getattr(module, name, None)
    if isinstance(parameter, nn.Parameter):
        spread = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))


def _cut_dim(placement: Placement) -> int | None:
    """The dimension along which ``placement`` cuts, strided or not; None for replicas."""
    dim: int | None = getattr(placement, "dim", None)
    return dim
