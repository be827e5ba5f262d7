"""The fork server never touches CUDA: ranks are forked from it, and a forked process could not use it."""

from __future__ import annotations

import subprocess
import sys

WATCHED = """
import torch

def touched(*_, **__):
    raise AssertionError("CUDA was initialised")

torch.cuda._lazy_init = torch._C._cuda_init = touched
import core_rl.launch.preload
missing = [name for name in core_rl.launch.preload.MODULES if name not in __import__("sys").modules]
assert not missing, missing
assert not torch.cuda.is_initialized()
"""


def test_preloading_initialises_no_cuda() -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
