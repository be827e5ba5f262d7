"""An accelerator without room for a model is an error before its weights are read. CUDA is simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from core_rl.backend.train_backend import BuildContext
from core_rl.config.engine import TrainEngineConfig
from core_rl.distributed.comm import Comm, RankGroups
from core_rl.errors import OutOfDeviceMemory
from core_rl.toolkit.cuda import require_device_memory

CUDA = torch.device("cuda", 1)
GIB = 2**30


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """An accelerator of 80 GiB; the sizes may be changed."""
    sizes = {"free": 20 * GIB, "reserved": 0, "allocated": 0}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (sizes["free"], 80 * GIB))
    for name in ("reserved", "allocated"):
        monkeypatch.setattr(f"torch.cuda.memory_{name}", lambda device, name=name: sizes[name])
    return sizes


def context(device: torch.device = CUDA, **fields: Any) -> BuildContext[TrainEngineConfig]:
    world = Comm()
    config = TrainEngineConfig(**{"model": {"config": {}}, **fields})
    return BuildContext(config=config, world=world, groups=RankGroups(data_parallel=world), device=device)


@pytest.mark.usefixtures("memory")
def test_full_device_is_named_with_needed_memory() -> None:
    model = nn.Linear(2**15, 2**16, bias=False, device="meta")
    message = (
        r"cuda:1 has 20\.0 GiB free of 80\.0 GiB, and weights, gradients and moments of a rank need 32\.0 GiB; .*"
        r"CUDA_VISIBLE_DEVICES.*layout"
    )
    with pytest.raises(OutOfDeviceMemory, match=message):
        require_device_memory(context(), model)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    "fits",
    [
        {"layout": {"tp": 2}},
        {"layout": {"dp": 2, "ep": 2}},
        {"optimizer": None},
        {"device": torch.device("cpu")},
    ],
)
def test_fitting_model_is_built(fits: dict[str, Any]) -> None:
    require_device_memory(context(**fits), nn.Linear(2**15, 2**16, bias=False, device="meta"))


def test_reserved_memory_of_this_process_is_free(memory: dict[str, int]) -> None:
    model = nn.Linear(2**15, 2**16, bias=False, device="meta")
    memory |= {"free": 10 * GIB, "reserved": 30 * GIB, "allocated": 5 * GIB}
    require_device_memory(context(), model)
    memory["allocated"] = 10 * GIB
    with pytest.raises(OutOfDeviceMemory, match=r"30\.0 GiB free"):
        require_device_memory(context(), model)
