"""Functions that ranks on pretend machines run."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import torch
from group_support import rank_of

from core_rl.distributed.process_group import launched_world
from core_rl.engine.train import TrainEngine

__all__ = ["die", "host_name", "master_weights", "surroundings", "wait"]


def host_name(engine: TrainEngine) -> str:
    return socket.gethostname()


def surroundings(engine: TrainEngine) -> dict[str, object]:
    return {
        "hostname": socket.gethostname(),
        "launched": launched_world(),
        "slurm": [name for name in os.environ if name.startswith("SLURM_")],
        "key": [name for name in os.environ if "KEY" in name and name.startswith("CORE_RL")],
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "threads": torch.get_num_threads(),
        "files": sorted(path.name for path in Path("/dev/shm").glob("of_*")),
    }


def die(engine: TrainEngine, rank: int, name: str) -> None:
    """Rank ``rank`` dies of a signal at once, and the others wait for it as in a collective."""
    if rank_of(engine) == rank:
        os.kill(os.getpid(), signal.Signals[name])
    time.sleep(300)


def wait(engine: TrainEngine, seconds: float) -> None:
    time.sleep(seconds)


def master_weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """All weights in full, on each rank."""
    return {name: tensor.clone() for name, tensor in engine.named_tensors("master") if tensor is not None}
