"""Agents on this machine, which stand for machines of a cluster and are started again when they end."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from core_rl.servers.process import bound


class Agents:
    """Agents for ``machines``, as a cluster's owner keeps them: each is replaced when it ends."""

    def __init__(self, directory: Path, machines: int) -> None:
        self.key_file = directory / "key"
        self.key_file.write_text(secrets.token_hex(32))
        self.key_file.chmod(0o600)
        self._reserved = bound("127.0.0.1", 0)
        """The driver's port, also while no driver listens there."""
        self.port: int = self._reserved.getsockname()[1]
        self._directory = directory
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._gone: set[int] = set()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._keep, args=(machine,), daemon=True) for machine in range(machines)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for machine in list(self._processes):
            self.kill(machine)
        for thread in self._threads:
            thread.join(30)
        self._reserved.close()

    def section(self, **changes: Any) -> dict[str, Any]:
        """The section ``cluster`` of a recipe for them."""
        return {
            "type": "attach",
            "machines": len(self._threads),
            "ranks_per_machine": 1,
            "address": "127.0.0.1",
            "port": self.port,
            "key_file": str(self.key_file),
            "wait_s": 120.0,
        } | changes

    def kill(self, machine: int, for_good: bool = False) -> None:
        """Power off; a new machine takes its place, unless it is gone ``for_good``."""
        if for_good:
            self._gone.add(machine)
        self._processes[machine].send_signal(signal.SIGKILL)

    def _keep(self, machine: int) -> None:
        # A core for each: ranks have as many threads as on one machine, and round as there.
        cores = sorted(os.sched_getaffinity(0))
        command = [
            "taskset",
            "-c",
            str(cores[machine % len(cores)]),
            sys.executable,
            "-m",
            "core_rl.cli",
            "agent",
        ]
        command += ["--driver", f"127.0.0.1:{self.port}"]
        command += ["--machine", str(machine), "--key-file", str(self.key_file)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        while not self._closed and machine not in self._gone:
            with (self._directory / f"agent-{machine}.log").open("ab") as log:
                process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            self._processes[machine] = process
            process.wait()
