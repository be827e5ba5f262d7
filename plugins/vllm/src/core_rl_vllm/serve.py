"""Script that starts a vLLM server in the server's own Python, which has no core-rl.

``python serve.py --model ... --port ...`` takes the arguments of ``vllm serve``; see `server_side` for standard input.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    # Python looks for modules in a script's directory first, and those there would hide the server's own.
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]
    if key := runpy.run_path(os.environ["CORE_RL_SERVER_SIDE"])["begin"]():
        os.environ["VLLM_API_KEY"] = key
    # Not the command ``vllm``, which asks for the distribution of that name, and on CPUs it is another.
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
