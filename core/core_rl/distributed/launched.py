"""The world that a launcher names in the environment: ``torchrun`` by ``RANK`` and others, ``srun`` by ``SLURM_*``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from core_rl.errors import ConfigError

__all__ = ["LaunchedWorld", "launched_world"]


@dataclass(frozen=True, kw_only=True)
class _Names:
    """The variables of one launcher."""

    rank: str
    world_size: str
    local_rank: str


LAUNCHERS = {
    "torchrun": _Names(rank="RANK", world_size="WORLD_SIZE", local_rank="LOCAL_RANK"),
    # Slurm sets SLURM_NTASKS for the batch script as well, which runs once.
    "srun": _Names(rank="SLURM_PROCID", world_size="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID"),
}


@dataclass(frozen=True, kw_only=True)
class LaunchedWorld:
    """This process among those that a launcher started."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    """Its number on its machine, which is that of its device."""

    def __str__(self) -> str:
        names = LAUNCHERS[self.launcher]
        return (
            f"one of {self.world_size} processes that {self.launcher} started ({names.rank}={self.rank}, "
            f"{names.world_size}={self.world_size})"
        )

    def leader(self) -> tuple[str, int]:
        """The host name of rank 0 and the port where it is to be met.

        Raises `ConfigError` where the environment does not say.
        """
        host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdigit():
            raise ConfigError(
                f"this is {self}, and MASTER_ADDR={host!r}, MASTER_PORT={port!r} do not say where they meet: set them "
                "to the host of rank 0 and a free port of it, the same for all (under Slurm, "
                "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1))"
            )
        return host, int(port)


def launched_world() -> LaunchedWorld | None:
    """The world of several processes that a launcher has started this one for; None for a process of its own."""
    for launcher, names in LAUNCHERS.items():
        found = [os.environ.get(name, "") for name in (names.rank, names.world_size, names.local_rank)]
        rank, size, local = (int(text) if text.isdigit() else None for text in found)
        if rank is not None and size is not None and size > 1:
            own = rank if local is None else local
            return LaunchedWorld(launcher=launcher, rank=rank, world_size=size, local_rank=own)
    return None
