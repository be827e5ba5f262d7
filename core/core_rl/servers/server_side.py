"""First part of a server's script, in the server's own Python, which has no core-rl.

Standard input is a pipe from the process that started it. Its first line is the API key, or empty; its second the file
that `write_environment` writes. When that process ends, however it ends, so does the server with all its children.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path


def begin() -> str:
    """Read the API key and the file for `write_environment` from standard input; returns the key."""
    api_key, environment_file = _line(), _line()
    die_with_parent()
    write_environment(environment_file)
    return api_key


def _line() -> str:
    # Unbuffered: nothing is read ahead.
    line: bytes = sys.stdin.buffer.raw.readline()  # type: ignore[union-attr]
    return line.decode().strip()


def write_environment(file: str) -> None:
    """Write torch's and NCCL's versions and the UUIDs of the GPUs into ``file``, as JSON."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    environment = {
        "torch": torch.__version__,
        "nccl": nccl_version() if count else None,
        "gpus": [str(torch.cuda.get_device_properties(number).uuid) for number in range(count)],
    }
    Path(file).write_text(json.dumps(environment), encoding="utf-8")


def nccl_version() -> tuple[int, ...]:
    """As ``core_rl.weight_sync.cuda.nccl_version``, which this environment does not have."""
    import torch

    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return tuple(torch.cuda.nccl.version()[:3])
    code = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(code))
    return code.value // 10000, code.value // 100 % 100, code.value % 100


def die_with_parent() -> None:
    """End this process group, children included, as soon as standard input ends."""

    def wait_for_the_end() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait_for_the_end, name="die-with-parent", daemon=True).start()
