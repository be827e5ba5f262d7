"""Weight sync from CUDA, which is simulated: what both ends must agree on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.errors import WeightsError
from core_rl.weight_sync import accelerators
from core_rl.weight_sync.accelerators import CudaEnvironment, require_nccl
from core_rl.weight_sync.group import ReceiverRanks, RendezvousServer
from core_rl.weight_sync.sender import send_tensors
from core_rl.weight_sync.stream import receiving

CUDA = torch.device("cuda", 0)
OWN = "gpu-of-the-trainer"
NCCL = (2, 27, 5)


def environment(nccl: tuple[int, ...] | None = NCCL, gpus: tuple[str, ...] = ("another",)) -> CudaEnvironment:
    """The environment of a server, on another GPU of the same machine unless said otherwise."""
    return CudaEnvironment(torch=(2, 13), nccl=nccl, gpus=gpus, visible=frozenset({OWN, *gpus}))


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender is on the GPU `OWN`, with NCCL 2.27.5."""
    monkeypatch.setattr(accelerators, "nccl_version", lambda: NCCL)
    monkeypatch.setattr(accelerators, "gpu_uuid", lambda device: OWN)


REFUSED = {
    "another version": (
        environment((2, 28, 9)),
        r"NCCL 2\.27\.5 of the trainer and NCCL 2\.28\.9 .*'tensor'",
    ),
    "another patch": (
        environment((2, 27, 7)),
        r"NCCL 2\.27\.5 of the trainer and NCCL 2\.27\.7 .*nvidia-nccl",
    ),
    "the same GPU": (
        environment(gpus=(OWN,)),
        rf"both on the GPU {OWN}.*'tensor'.*placement\.rollout",
    ),
}


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("case", REFUSED)
def test_ranks_that_nccl_refuses_are_refused_before_they_join(tmp_path: Path, case: str) -> None:
    server, message = REFUSED[case]
    meta = WeightUpdateMeta(method="distributed", version=1, path=str(tmp_path / "meet"))
    ranks = ReceiverRanks(count=1, cuda=(environment(), server))

    def receive() -> None:
        with receiving(meta, 20, lambda: ranks) as received:
            list(received)

    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(receive)
        with pytest.raises(WeightsError, match=message):
            send_tensors(iter([("a", torch.zeros(2))]), meta, device=CUDA)
        with pytest.raises(WeightsError, match=message):
            arrival.result(20)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("servers", [(), (environment(),), (environment(None),)])
def test_ranks_of_the_same_or_an_unknown_version_join(servers: tuple[CudaEnvironment, ...]) -> None:
    require_nccl(servers, CUDA)


def test_ranks_on_the_cpu_join_a_sender_on_cuda_by_gloo() -> None:
    server = environment(gpus=(OWN,))
    rendezvous = RendezvousServer(ReceiverRanks(count=1, on_cpu=True, cuda=(server,)), CUDA)
    assert rendezvous.address.backend == "gloo"
    rendezvous.close()


def test_the_runtime_version_of_nccl_is_that_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tells the version that it was built with, and environments replace the library."""

    class Library:
        def ncclGetVersion(self, code: Any) -> None:  # noqa: N802
            code._obj.value = 22809

    from core_rl.weight_sync.accelerators import nccl_version

    monkeypatch.setattr("ctypes.CDLL", lambda name: Library())
    assert nccl_version() == (2, 28, 9)
    monkeypatch.setattr("ctypes.CDLL", lambda name: (_ for _ in ()).throw(OSError()))
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (*NCCL, "suffix"))
    assert nccl_version() == NCCL
