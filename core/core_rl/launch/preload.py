"""Imports of the fork server, which every rank inherits in memory.

`fork_server` imports this module by name, and nothing else does. None of these imports runs a
kernel, starts an OpenMP thread or touches CUDA: a forked process could not use either afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import os

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

# OpenMP reads it when torch is loaded. Threads that spin while they wait take the cores from the other
# ranks: with as few as one busy process too many, a step of a tiny model took 20 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

for _name in MODULES:
    # The fork server must survive a broken package: the rank that imports it reports the error.
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
