"""``core-rl agent``: the ranks of this machine, for a driver on another one."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["agent"]

MACHINE_VARIABLES = ("GROUP_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
"""The number of this machine, as torchrun, Slurm and Kubernetes set it."""


def agent(
    driver: Annotated[str, typer.Option(help="HOST:PORT of the driver.", envvar="CORE_RL_DRIVER")],
    machine: Annotated[
        int | None,
        typer.Option(help="The number of this machine; by default what the launcher says, or any."),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the key; by default it is in CORE_RL_CLUSTER_KEY.")
    ] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the driver.")] = 300.0,
    stay: Annotated[bool, typer.Option(help="Serve one driver after the other, each waited for.")] = False,
    with_parent: Annotated[bool, typer.Option(help="End when standard input is closed.")] = False,
) -> None:
    """Start ranks on this machine for a driver elsewhere, and end with it."""
    from core_rl.launch.process import end_fork_server
    from core_rl_cluster.agent import run_agent
    from core_rl_cluster.hello import take_key

    key = take_key(key_file)
    if with_parent:
        threading.Thread(target=_end_with_input, name="core-rl parent", daemon=True).start()
    number = _machine() if machine is None else machine
    try:
        run_agent(driver, key, number, wait)
        while stay:
            run_agent(driver, key, number, wait)
    finally:
        end_fork_server()


def _machine() -> int | None:
    """The number that a launcher gave to this machine."""
    numbers = [os.environ[name] for name in MACHINE_VARIABLES if os.environ.get(name, "").isdigit()]
    return int(numbers[0]) if numbers else None


def _end_with_input() -> None:
    # Below Python's buffer, whose lock the end of the program would find taken.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)  # ranks end with their parent
