"""The machine, a group of one rank, and process groups."""

from __future__ import annotations

import inspect
import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_models import TINY
from gpu_points import Figures, Setting
from torch._C._distributed_c10d import HashStore
from torch.nn.attention.varlen import varlen_attn

from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup
from core_rl.machine import describe_machine


@pytest.mark.gpu(limit_s=60)
def test_machine(setting: Setting) -> Figures:
    """Versions, shared memory, open files, the GPU and its kernels.

    Raises where kernels lack arguments that packed attention passes.
    """
    missing = {"scale", "window_size"} - inspect.signature(varlen_attn).parameters.keys()
    if missing:
        raise RuntimeError(f"varlen_attn of torch {torch.__version__} has no {sorted(missing)}")
    shared = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    machine_info = describe_machine()
    figures: dict[str, float | str] = {
        "torch": torch.__version__,
        "python": machine_info.python,
        "cores": machine_info.cores,
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shared memory, MiB": 0 if shared is None else shared.f_bavail * shared.f_frsize / 2**20,
    }
    if setting.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        figures |= {
            "gpu": torch.cuda.get_device_name(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "cuda": str(torch.version.cuda),
            "free memory, MiB": free / 2**20,
            "memory, MiB": total / 2**20,
        }
    return figures


@pytest.mark.nightly
@pytest.mark.gpu(limit_s=120)
def test_group(setting: Setting) -> Figures:
    """An EngineGroup of one rank starts, computes and ends.

    Raises where a rank computes wrongly, or processes are left.
    """
    with EngineGroup("fsdp", model={"config": TINY}, device=setting.device) as ranks:
        (product,), pids, starting_s = ranks.run(_product), ranks.pids, ranks.starting_s
    if product != (8.0, setting.device):
        raise RuntimeError(f"the rank computed {product}, not (8.0, {setting.device!r})")
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    if left:
        raise RuntimeError(f"the processes {left} are left")
    return {"start of the processes, s": starting_s}


def _product(engine: TrainEngine) -> tuple[float, str]:
    ones = torch.ones(8, 8, device=engine.device)
    return float((ones @ ones)[0, 0]), engine.device.type


@pytest.mark.gpu(limit_s=120)
def test_process_groups(setting: Setting) -> Figures:
    """gloo and NCCL in one group, twice in one process.

    Raises where a sum over one rank is wrong.
    """
    backend = "gloo" if setting.rehearsal else "cpu:gloo,cuda:nccl"
    device = torch.device(setting.device, 0) if setting.device == "cuda" else None
    for _ in range(2):
        store = HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device)
        for place in {"cpu", setting.device}:
            total = torch.ones(2, device=place)
            dist.all_reduce(total)
            if total.tolist() != [1.0, 1.0]:
                raise RuntimeError(f"a sum on {place} is {total.tolist()}")
        dist.destroy_process_group()
    return {"groups": 2}
