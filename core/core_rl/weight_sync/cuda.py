"""CUDA at both ends of a weight sync: matching versions, and memory of the sender opened by CUDA IPC."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from core_rl.distributed.devices import expand_segments, segments_expand
from core_rl.errors import WeightsError, raise_all

NCCL_LIBRARY = "libnccl.so.2"
Version = tuple[int, ...]
DEVICE = 6
"""The place of the device's number among the arguments of torch's ``rebuild_cuda_tensor``."""


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
    """The version of NCCL that this process runs: of the library, since torch reports its build's version."""
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

    A handle of CUDA IPC has the version of its format, and torch refuses handles of a later torch.
    """
    torch_version = tuple(map(int, torch.__version__.split(".")[:2]))
    uuid = gpu_uuid(device)
    return all(uuid in server.visible and server.torch >= torch_version for server in servers)


def _violations(servers: Sequence[CudaEnvironment], local: Version, uuid: str) -> Iterator[str]:
    for nccl in sorted({server.nccl for server in servers if server.nccl not in (None, local)}):
        yield (
            f"NCCL {_dotted(local)} of the trainer and NCCL {_dotted(nccl)} of the servers refuse each other; install "
            "the same version of nvidia-nccl in both environments, or sync by 'tensor'"
        )
    if any(uuid in server.gpus for server in servers):
        yield (
            f"the rank that sends and a server are both on the GPU {uuid}, and NCCL takes one rank for each GPU; sync "
            "by 'tensor', or give the servers other devices"
        )


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True)
class DeviceMemory:
    """A flat buffer of a GPU, for one process that opens it once. Unpickling this opens nothing.

    torch frees the buffer when every process that it was given to has closed it.
    """

    arguments: tuple[Any, ...]
    """Arguments of torch's ``rebuild_cuda_tensor``, with the GPU's UUID for its number, which other processes may not
    share; SGLang's workers take either."""


def shared_with(flat: Tensor, readers: int) -> list[DeviceMemory]:
    """``flat`` for each of so many processes."""
    uuid = gpu_uuid(flat.device)
    memory = []
    for _ in range(readers):
        _, arguments = reduce_tensor(flat)
        memory.append(DeviceMemory((*arguments[:DEVICE], uuid, *arguments[DEVICE + 1 :])))
    return memory


class Opened:
    """Pickles as ``memory``, opened: the process that unpickles it gets a tensor [n] of uint8."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._arguments = memory.arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_cuda_tensor, self._arguments


def device_bytes(size: int, device: torch.device) -> Tensor:
    """A flat buffer [size] on ``device`` that CUDA IPC can share."""
    torch.cuda.ipc_collect()  # buffers that their readers have closed
    with _plain_segments():
        return torch.empty(size, dtype=torch.uint8, device=device)


@contextmanager
def _plain_segments() -> Iterator[None]:
    """Allocate outside of expandable segments.

    Their handles are file descriptors of this process (``pidfd_getfd``), which a process that is no child of it may
    not take where ptrace is restricted, as by default on Ubuntu and in containers.
    """
    if not segments_expand():
        yield
        return
    expand_segments(False)
    try:
        yield
    finally:
        expand_segments(True)
