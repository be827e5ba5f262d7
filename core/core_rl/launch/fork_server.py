"""Imports of the fork server, which every rank inherits in memory; it ends at once with the process that started it.

None of these imports runs a kernel, starts an OpenMP thread or touches CUDA: a forked process could not use either
afterwards.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import re
import select
import signal
import sys
from contextlib import suppress

COMMAND = re.compile(r"main\(\d+, (?P<alive>\d+),")
"""Command line of `multiprocessing`'s fork server, with the read end of a pipe that only the parent writes to."""
MODULES = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "safetensors.torch",
    "transformers",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "core_rl.launch.remote",
)
FURTHER = "CORE_RL_PRELOAD"
"""Environment variable with further modules, separated by commas: `EngineSpec.preload`."""


def _end_with_parent(alive: int) -> None:
    """Have the kernel kill this process when its parent ends.

    By itself it looks only after the imports, and then takes down an interpreter with many modules: seconds each.
    """
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([alive], [], [], 0)[0]:  # the parent was faster
        os._exit(0)


if command := COMMAND.search(sys.orig_argv[-1]):
    with suppress(OSError):  # sandboxes may refuse it
        _end_with_parent(int(command["alive"]))

# OpenMP reads it when torch is loaded. Threads that spin while they wait take the cores from the other
# ranks: with as few as one busy process too many, a step of a tiny model took 20 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

gc.disable()  # imports leave no garbage that is worth a search
for _name in (*MODULES, *filter(None, os.environ.pop(FURTHER, "").split(","))):
    # The fork server must survive a broken package: the rank that imports it reports the error.
    with suppress(Exception):
        importlib.import_module(_name)

# transformers compiles the patterns of all model families when it reads the first model: half of the time that a rank
# takes for a small one. The function is private to transformers' loading, and may be gone.
with suppress(Exception):
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")

# A full collection in a rank would search all these modules, a tenth of a second each, and copy their memory.
gc.freeze()
gc.enable()
