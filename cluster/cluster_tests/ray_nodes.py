"""Real Ray on pretend machines: the head where the test runs, and a node on each machine. Never ``ray stop``.

``ray stop`` ends every Ray on the box. Here each process is tied to its parent.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
from pretend_machines import DRIVER_ADDRESS, Machine, tied

PORT = 6379
START_S = 150.0
"""Seconds for one node: 6 to 10 on idle cores."""
STORE_BYTES = 80 * 2**20
"""Bytes of each node's object store; the least that Ray takes is 75 MiB."""
PARTS = ("ray/_private/", "ray/core/src/", "ray.scripts")
"""Parts of command lines of its processes."""
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
SETTINGS = {
    # By default, a node that is cut off is given up after a minute.
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
    # By default, a node ends when its agents have not started within 30 seconds, as on busy cores.
    "agent_register_timeout_ms": 120_000,
    "raylet_start_wait_time_s": 120,
    # By default, Ray's workers and their children give way to everybody else.
    "worker_niceness": 0,
}


@contextmanager
def ray_nodes(machines: Sequence[Machine], cpus: int = 4) -> Iterator[dict[str, str]]:
    """Ray on ``machines``, with ``cpus`` CPUs each and none at the driver, which is one more node.

    Yields the variables that a driver needs: the cluster's address and token. The test is skipped without Ray.
    """
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install ray")
    # Not below the test's folder: the path of a socket is at most 107 bytes long.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    address = f"{DRIVER_ADDRESS}:{PORT}"
    head = ["--head", f"--port={PORT}", f"--node-ip-address={DRIVER_ADDRESS}", "--num-cpus=0"]
    environ = _environment()
    with mock.patch.dict(os.environ, environ), ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        head += [f"--temp-dir={folder}", "--include-dashboard=false"]
        _await(_start(stack, here, head, folder / "head.log"), folder / "head.log")
        nodes = {}
        for machine in machines:
            node = [f"--address={address}", f"--num-cpus={cpus}", f"--node-ip-address={machine.address}"]
            log = folder / f"{machine.hostname}.log"
            nodes[log] = _start(stack, machine.run, node, log)
        for log, process in nodes.items():
            _await(process, log)
        yield environ | {"RAY_ADDRESS": address}


def of_ray(line: str) -> bool:
    """Whether ``line`` is the command line of a process of Ray itself, which starts and ends workers as it sees fit."""
    of_machine = line.startswith("ray::MachineActor")
    return not of_machine and (line.startswith("ray::") or any(part in line for part in PARTS))


def here(command: Sequence[str], *, output: Path) -> subprocess.Popen[str]:
    """As `Machine.run`, on the driver's machine."""
    with output.open("w") as file:
        return subprocess.Popen(tied(command), text=True, stdout=file, stderr=subprocess.STDOUT)


def _environment() -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        **{f"RAY_{name}": str(value) for name, value in SETTINGS.items()},
    }


def _start(
    stack: ExitStack, run: Callable[..., subprocess.Popen[str]], arguments: Sequence[str], log: Path
) -> subprocess.Popen[str]:
    """Start one node, which ends with ``stack``."""
    command = [*RAY, "start", "--block", f"--object-store-memory={STORE_BYTES}", *arguments]
    process = run(command, output=log)
    stack.callback(_end, process)
    return process


def _await(process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        if "Ray runtime started" in log.read_text():
            return
        time.sleep(0.1)
    pytest.fail(f"a Ray node did not start within {START_S:g} s:\n{log.read_text()[-2000:]}")


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
