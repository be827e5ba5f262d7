"""Script that runs a command in its process group until standard input ends: ``python keeper.py COMMAND ...``.

Its parent may be killed, and the server of the command must not outlive it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def end_with_parent() -> None:
    """Kill the process group, this process included, as soon as standard input ends."""
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.exit(subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL))
