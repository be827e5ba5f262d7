"""Checks of a machine before it launches servers: their Python and their ports."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack

from core_rl.errors import ConfigError
from core_rl.servers.config import ServerEngineConfig
from core_rl.servers.process import reserve_ports, server_environment

__all__ = ["machine_problems"]

LIMIT_S = 60.0
HAS_MODULE = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


def machine_problems(config: ServerEngineConfig) -> Iterator[str]:
    """Reasons for which this machine cannot launch the servers of ``config``; none where they run already."""
    if config.options.addresses:
        return
    if problem := _python_problem(config):
        yield problem
    try:
        with ExitStack() as until:
            reserve_ports(config.options, config.layout.dp, until)
    except ConfigError as error:
        yield str(error)


def _python_problem(config: ServerEngineConfig) -> str | None:
    python = config.server_python
    try:
        done = subprocess.run(
            [python, "-c", HAS_MODULE, config.module],
            env=server_environment({}),
            cwd=tempfile.gettempdir(),
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"options.python: {python!r} cannot be run: {error}; {_remedy(config)}"
    if done.returncode:
        return f"options.python: {python!r} has no {config.product}; {_remedy(config)}"
    return None


def _remedy(config: ServerEngineConfig) -> str:
    return f"name the Python of an environment with {config.product} there, or in the variable {config.python_variable}"
