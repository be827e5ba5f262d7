"""`AgentActor`: the Ray actor that runs the agent of one machine. Imports nothing but the standard library.

It travels to the machine by value: a machine without core-rl shows that in the output of its agent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence

__all__ = ["AgentActor"]

LINGER_S = 10.0
"""Seconds for the driver to hear how the agent has ended."""
TAIL_LINES = 25
"""Lines of the agent's output that an error repeats."""


class AgentActor:
    """The parent of one agent, which ends with it: the agent's standard input is a pipe of this process."""

    def serve(self, arguments: Sequence[str], secrets: Mapping[str, str]) -> str:
        """As `run`; then this process ends by itself. The driver, which ends it sooner, may be cut off."""
        phrase = self.run(arguments, secrets)
        end = threading.Timer(LINGER_S, os._exit, (0,))
        end.daemon = True
        end.start()
        return phrase

    def run(self, arguments: Sequence[str], secrets: Mapping[str, str]) -> str:
        """Run Python with ``arguments`` until it ends; returns a phrase about its end, with the end of its output.

        ``secrets`` are variables of its environment, which no other user of the machine can read.
        """
        environment = {**os.environ, **secrets, "PYTHONPATH": _module_path()}
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        with subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                tail.append(line)
                sys.stdout.write(line)  # Ray shows it at the driver
                sys.stdout.flush()
        return f"ended with exit code {process.returncode}; the end of its output:\n{''.join(tail)}"


def _module_path() -> str:
    """The modules of this process, for another process: with its ``runtime_env``, without Ray's additions."""
    added = [f"{path}{os.sep}" for path in getattr(sys.modules.get("ray"), "__path__", ())]
    return os.pathsep.join(path for path in sys.path if path and not path.startswith(tuple(added)))
