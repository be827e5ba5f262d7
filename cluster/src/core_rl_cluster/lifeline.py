"""Run a command that ends with the process that started this one: ``python lifeline.py COMMAND ...``.

That process holds the other end of standard input, which also a ``kill -9`` closes. Started by path, and imports
nothing of core_rl: it is up at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

__all__ = ["main"]

GRACE_S = 1.0
"""Seconds from SIGTERM to SIGKILL. After the first, srun ends its tasks and leaves nothing for Slurm to clean up."""


def main(command: list[str]) -> int:
    """The exit code of ``command``, which is ended when standard input closes."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_input, args=(process,), daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


def _end_with_input(process: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
