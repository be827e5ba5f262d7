"""Functions that ranks on pretend machines run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import torch
from group_support import rank_of

from core_rl.distributed.process_group import launched_world
from core_rl.engine.train import TrainEngine


def host_name(engine: TrainEngine) -> str:
    return socket.gethostname()


def surroundings(engine: TrainEngine) -> dict[str, object]:
    return {
        "hostname": socket.gethostname(),
        "launched": launched_world(),
        "launcher": [name for name in os.environ if name.startswith(("SLURM_", "RAY_"))],
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "threads": torch.get_num_threads(),
        "files": sorted(path.name for path in Path("/dev/shm").glob("of_*")),
    }


def die(engine: TrainEngine, rank: int, name: str) -> None:
    """Rank ``rank`` dies of a signal at once, and the others wait for it as in a collective."""
    if rank_of(engine) == rank:
        os.kill(os.getpid(), signal.Signals[name])
    time.sleep(300)


def add_rank(engine: TrainEngine, tensor: torch.Tensor) -> float:
    """The largest element, after the rank's number was added in place."""
    return tensor.add_(rank_of(engine)).max().item()


def this_host() -> str:
    return socket.gethostname()


def start_child() -> int:
    return subprocess.Popen(["sleep", "4321"]).pid


def wait(engine: TrainEngine, seconds: float) -> None:
    time.sleep(seconds)
