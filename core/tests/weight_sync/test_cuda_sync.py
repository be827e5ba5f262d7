"""Weight sync from CUDA, which is simulated: what both ends must agree on, and buckets that others open."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_support import CUDA, NCCL, OWN, TORCH, FakeGpu, environment, gpu
from torch import Tensor

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.errors import WeightsError
from core_rl.weight_sync import cuda
from core_rl.weight_sync.buckets import flat_bytes, start_of
from core_rl.weight_sync.cuda import CudaEnvironment, Opened, can_open, require_nccl
from core_rl.weight_sync.distributed import RendezvousServer
from core_rl.weight_sync.messages import Bucket, ReceiverRanks
from core_rl.weight_sync.update import weight_update

__all__ = ["gpu"]

REFUSED = {
    "another version": (
        environment((2, 28, 9)),
        r"NCCL 2\.27\.5 of the trainer and NCCL 2\.28\.9 .*'tensor'",
    ),
    "another patch": (
        environment((2, 27, 7)),
        r"NCCL 2\.27\.5 of the trainer and NCCL 2\.27\.7 .*nvidia-nccl",
    ),
    "the same GPU": (environment(gpus=(OWN,)), rf"both on the GPU {OWN}.*'tensor'.*other devices"),
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("case", REFUSED)
def test_incompatible_nccl_ranks_are_refused_before_joining(tmp_path: Path, case: str) -> None:
    server, message = REFUSED[case]
    meta = WeightUpdateMeta(method="distributed", version=1, path=str(tmp_path / "meet"))
    ranks = ReceiverRanks(count=1, cuda=(environment(), server))

    def receive() -> None:
        with weight_update(meta).receive(20, lambda: ranks) as received:
            list(received)

    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(receive)
        with pytest.raises(WeightsError, match=message):
            weight_update(meta).send(iter([("a", torch.zeros(2))]), device=CUDA)
        with pytest.raises(WeightsError, match=message):
            arrival.result(20)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("servers", [(), (environment(),), (environment(None),)])
def test_ranks_of_same_or_unknown_version_join(servers: tuple[CudaEnvironment, ...]) -> None:
    require_nccl(servers, CUDA)


def test_cpu_ranks_join_cuda_sender_by_gloo() -> None:
    server = environment(gpus=(OWN,))
    rendezvous = RendezvousServer(ReceiverRanks(count=1, on_cpu=True, cuda=(server,)), CUDA)
    assert rendezvous.address.backend == "gloo"
    rendezvous.close()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("servers", "expected"),
    [
        ([environment()], True),
        ([environment(gpus=(OWN,))], True),
        ([environment(torch_version=(TORCH[0], TORCH[1] + 1))], True),
        ([environment(torch_version=(TORCH[0], TORCH[1] - 1))], False),
        ([environment(visible=())], False),
        ([environment(), environment(visible=())], False),
    ],
)
def test_servers_open_visible_gpus_with_recent_torch(servers: list[CudaEnvironment], expected: bool) -> None:
    assert can_open(servers, CUDA) is expected


TENSORS = [(f"t{n}", torch.randn(5 + n, 7).to((torch.float32, torch.bfloat16)[n % 2])) for n in range(9)]
TENSORS.append(("empty", torch.empty(0, 3)))


def sent(tmp_path: Path, ranks: ReceiverRanks, gpu: FakeGpu) -> list[tuple[Bucket, list[Bucket], int]]:
    """For each bucket: its shared memory, the tensors read on the GPU by rank, and the number of live buffers."""
    meta = WeightUpdateMeta(
        method="tensor", version=1, path=str(tmp_path / "meet"), bucket_bytes=600, verify=True
    )

    def receive() -> list[tuple[Bucket, list[Bucket], int]]:
        actual = []
        with weight_update(meta).receive(20, lambda: ranks) as received:
            for bucket in received:
                flats = [gpu.rebuild(*memory.arguments) for memory in received.device_memory]
                copy = [(name, tensor.clone()) for name, tensor in bucket]
                actual.append((copy, [placed_in(flat, bucket) for flat in flats], gpu.alive))
        return actual

    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(receive)
        weight_update(meta).send(iter(TENSORS), device=CUDA)
        return arrival.result(20)


def placed_in(flat: Tensor, bucket: Bucket) -> Bucket:
    """The tensors of ``flat``, which has the layout of ``bucket``."""
    assert flat.shape == flat_bytes(bucket).shape
    starts = [start_of(tensor) for _, tensor in bucket]
    return [
        (name, flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        for start, (name, tensor) in zip(starts, bucket, strict=True)
    ]


def require_same(actual: Bucket, expected: Bucket) -> None:
    assert [name for name, _ in actual] == [name for name, _ in expected]
    assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(actual, expected, strict=True))


def test_server_ranks_open_each_gpu_bucket(tmp_path: Path, gpu: FakeGpu) -> None:
    server = environment(gpus=("another", OWN))
    actual = sent(tmp_path, ReceiverRanks(count=4, cuda=(server, server)), gpu)
    assert len(actual) > 3
    require_same([item for bucket, _, _ in actual for item in bucket], TENSORS)
    for bucket, opened, _ in actual:
        assert len(opened) == 4
        for per_rank in opened:
            require_same(per_rank, bucket)
    assert not gpu.open, "each handle was opened once"
    assert gpu.copies == len(actual), "one copy to the host for each bucket, and none for each tensor"
    # This bucket and its predecessor, which servers may still read; at the end there is no next one to fill.
    assert [alive for *_, alive in actual[1:]] >= [2] * len(actual[1:])
    assert max(alive for *_, alive in actual) <= 3
    assert gpu.alive == 0


@pytest.mark.parametrize(
    "ranks",
    [
        ReceiverRanks(count=1, cuda=(environment(visible=()),)),
        ReceiverRanks(count=2, cuda=(environment(),)),
        ReceiverRanks(count=1),
    ],
)
def test_servers_without_gpu_access_read_shared_memory(
    tmp_path: Path, gpu: FakeGpu, ranks: ReceiverRanks
) -> None:
    actual = sent(tmp_path, ranks, gpu)
    require_same([item for bucket, _, _ in actual for item in bucket], TENSORS)
    assert not any(opened for _, opened, _ in actual)
    assert gpu.copies == len(actual)
    assert max(alive for *_, alive in actual) <= 2


def test_memory_is_opened_where_it_is_unpickled(gpu: FakeGpu) -> None:
    flat = torch.arange(8, dtype=torch.uint8)
    (memory,) = cuda.shared_with(flat, 1)
    assert pickle.loads(pickle.dumps(memory)) == memory, "the receiver passes it on, and opens nothing"
    payload = pickle.dumps(Opened(memory))
    assert gpu.open
    assert torch.equal(pickle.loads(payload), flat)
    assert not gpu.open


def test_shared_buffers_avoid_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, local, seen = torch._C._accelerator_getAllocatorSettings, torch.empty, list[str]()

    def empty(*size: Any, device: torch.device, **options: Any) -> Tensor:
        seen.append(settings())
        return local(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    for value in ("True", "False"):
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{value}")
        cuda.device_bytes(8, CUDA)
        assert settings() == f"expandable_segments:{value}", "as it was"
    assert seen == ["expandable_segments:False"] * 2


def test_nccl_version_comes_from_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tells the version that it was built with, and environments replace the library."""

    class Library:
        def ncclGetVersion(self, code: Any) -> None:  # noqa: N802
            code._obj.value = 22809

    from core_rl.weight_sync.cuda import nccl_version

    monkeypatch.setattr("ctypes.CDLL", lambda name: Library())
    assert nccl_version() == (2, 28, 9)
    monkeypatch.setattr("ctypes.CDLL", lambda name: (_ for _ in ()).throw(OSError()))
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (*NCCL, "suffix"))
    assert nccl_version() == NCCL
