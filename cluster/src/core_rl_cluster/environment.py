"""Surroundings that ranks on other machines take over from the driver: paths of code, and some of the environment."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from core_rl_cluster.network import interface_of

__all__ = ["adopt", "environment_of_ranks", "of_driver", "shared_environment"]

SHARED = (
    "CUBLAS_WORKSPACE_CONFIG",
    "HF_HUB_OFFLINE",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
    "TORCH_LOGS",
    "TRANSFORMERS_OFFLINE",
    "TRANSFORMERS_VERBOSITY",
)
"""Variables that mean the same on every machine, and are no secrets: the connection is not encrypted."""
LAUNCHERS = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_")
LAUNCHED = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables of a launcher for the agent, whose ranks are another world."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def of_driver() -> dict[str, Any]:
    """Return the places of code of this process: its directory, ``sys.path`` and main script."""
    main = sys.modules["__main__"]
    spec: ModuleSpec | None = getattr(main, "__spec__", None)
    directory = str(Path.cwd())
    return {
        "directory": directory,
        "path": [entry or directory for entry in sys.path],
        "main_file": None if spec else getattr(main, "__file__", None),
        "main_module": spec.name if spec else None,
    }


def adopt(driver: Mapping[str, Any]) -> None:
    """Find code where the driver finds it, as far as this machine has it: for processes that are started next.

    So functions of the driver's script can be called where the script has the same path.
    """
    if Path(driver["directory"]).is_dir():
        os.chdir(driver["directory"])
    sys.path += [entry for entry in driver["path"] if entry not in sys.path and Path(entry).exists()]
    # `multiprocessing` runs the main script in each new process, under another name.
    main = ModuleType("__main__")
    name, file = driver["main_module"], driver["main_file"]
    if name is not None and importlib.util.find_spec(name.partition(".")[0]) is not None:
        main.__spec__ = ModuleSpec(name, None)
    elif file is not None and Path(file).is_file():
        main.__file__ = file
    sys.modules["__main__"] = main


def shared_environment(names: Sequence[str]) -> dict[str, str]:
    """Return the driver's variables for ranks on other machines: ``names``, and some that are the same everywhere."""
    return {name: os.environ[name] for name in (*SHARED, *names) if name in os.environ}


def environment_of_ranks(shared: Mapping[str, str], address: str) -> dict[str, str]:
    """The environment of ranks on this machine, which has ``address`` towards the driver."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHED and not name.startswith(LAUNCHERS)
    }
    # Without it gloo takes the address of the host name, which may be 127.0.1.1.
    interface = interface_of(address)
    interfaces = {} if interface is None else dict.fromkeys(INTERFACES, interface)
    return {**interfaces, **inherited, **shared}
