"""CUDA libraries and GPUs at both ends of a weight sync, and what has to agree between them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from core_rl.errors import WeightsError, raise_all

__all__ = ["CudaEnvironment", "can_open", "gpu_uuid", "nccl_version", "require_nccl"]

NCCL_LIBRARY = "libnccl.so.2"
Version = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CudaEnvironment:
    """CUDA libraries and GPUs of a server's ranks, which run in a Python environment of their own."""

    torch: Version
    """Major and minor version."""
    nccl: Version | None
    """Version of NCCL, None where torch has none."""
    gpus: tuple[str, ...]
    """UUIDs of the GPUs that the ranks compute on."""
    visible: frozenset[str]
    """UUIDs of all GPUs that their processes see."""


def nccl_version() -> Version:
    """The version of NCCL that this process runs: that of the library, as torch tells the one it was built with."""
    try:
        library = ctypes.CDLL(NCCL_LIBRARY)  # torch has loaded it
    except OSError:  # a part of torch
        return tuple(torch.cuda.nccl.version()[:3])
    code = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(code))
    return code.value // 10000, code.value // 100 % 100, code.value % 100


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a CUDA device, by which other processes know it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def require_nccl(servers: Sequence[CudaEnvironment], device: torch.device) -> None:
    """Raise one `WeightsError` unless NCCL can join this process on ``device`` with the ranks of ``servers``."""
    raise_all(WeightsError, "method = 'distributed'", _violations(servers, nccl_version(), gpu_uuid(device)))


def can_open(servers: Sequence[CudaEnvironment], device: torch.device) -> bool:
    """Whether all ``servers`` can open memory of the CUDA ``device``: their processes see it, with no older torch.

    A handle of CUDA IPC has the version of its format, and torch refuses what a later torch wrote.
    """
    own = tuple(map(int, torch.__version__.split(".")[:2]))
    uuid = gpu_uuid(device)
    return all(uuid in server.visible and server.torch >= own for server in servers)


def _violations(servers: Sequence[CudaEnvironment], own: Version, uuid: str) -> Iterator[str]:
    for nccl in sorted({server.nccl for server in servers if server.nccl not in (None, own)}):
        yield (
            f"NCCL {_dotted(own)} of the trainer and NCCL {_dotted(nccl)} of the servers refuse each other; install "
            "the same version of nvidia-nccl in both environments, or sync by 'tensor' (rollout.sync in a recipe)"
        )
    if any(uuid in server.gpus for server in servers):
        yield (
            f"the rank that sends and a server are both on the GPU {uuid}, and NCCL takes one rank for each GPU; sync "
            "by 'tensor' (rollout.sync in a recipe), or give the servers other devices (placement.rollout)"
        )


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
