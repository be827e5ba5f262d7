"""The machine, a group of one rank, and process groups."""

from __future__ import annotations

import inspect
import os
import resource
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.attention.varlen import varlen_attn

from core_rl.engine.train import TrainEngine
from core_rl.launch.group import EngineGroup
from core_rl.machine import describe_machine
from core_rl_gpu.setting import Figures, Setting
from core_rl_gpu.shapes import TINY

__all__ = ["group", "machine", "process_groups"]


def machine(setting: Setting) -> Figures:
    """Raises where kernels lack arguments that packed attention passes."""
    missing = {"scale", "window_size", "enable_gqa"} - inspect.signature(varlen_attn).parameters.keys()
    if missing:
        raise RuntimeError(f"varlen_attn of torch {torch.__version__} has no {sorted(missing)}")
    shared = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108
    found = describe_machine()
    figures: dict[str, float | str] = {
        "torch": torch.__version__,
        "python": found.python,
        "cores": found.cores,
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


def group(setting: Setting) -> Figures:
    """Raises where a rank computes wrongly, or processes are left."""
    with EngineGroup("fsdp", model={"config": TINY}, device=setting.device) as ranks:
        (found,), pids, starting_s = ranks.run(_product), ranks.pids, ranks.starting_s
    if found != (8.0, setting.device):
        raise RuntimeError(f"the rank computed {found}, not (8.0, {setting.device!r})")
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    if left:
        raise RuntimeError(f"the processes {left} are left")
    return {"start of the processes, s": starting_s}


def _product(engine: TrainEngine) -> tuple[float, str]:
    ones = torch.ones(8, 8, device=engine.device)
    return float((ones @ ones)[0, 0]), engine.device.type


def process_groups(setting: Setting) -> Figures:
    """Raises where a sum over one rank is wrong."""
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
