"""Script that runs a command in its process group until standard input ends: ``python keeper.py COMMAND ...``.

Its parent may be killed, and the server of the command must not outlive it.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys

if __name__ == "__main__":
    runpy.run_path(os.environ["CORE_RL_SERVER_SIDE"])["die_with_parent"]()
    sys.exit(subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL))
