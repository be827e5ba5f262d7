"""Servers on other machines: `ServerProcess` in a process there, and `PlacedServer` as the driver sees it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from core_rl.backend.inference_protocols import MachineProcess
from core_rl.errors import GroupError, RolloutError
from core_rl.servers.config import ServerEngineConfig
from core_rl.servers.process import ServerProcess, bound
from core_rl.weight_sync.cuda import CudaEnvironment

Start: TypeAlias = Callable[[Any, int, str | None], ServerProcess]
"""Function of a module that starts the server of a config, on a port, for clients with the API key.

Raises `ConfigError`, also for a model that its machine lacks.
"""


class PlacedServer:
    """A server in ``process``, on its machine. Calls raise `RolloutError` where the machine or the process is gone."""

    def __init__(
        self, config: ServerEngineConfig, number: int, process: MachineProcess, start: Start
    ) -> None:
        """Raises `ConfigError` for a machine on which server ``number`` cannot run, and `RolloutError`."""
        self._process, self._start = process, start
        with _reached():
            process.start()
            self._config = config.on_machine(number, process.devices, process.address)
            ports = config.options.ports
            self._port: int = process.call(reserve_port, process.address, ports[number] if ports else 0)
        self.address = f"{self._config.options.host}:{self._port}"

    def start(self) -> PlacedServer:
        """Start the server, in a new process where that one is gone; returns this object."""
        with _reached():
            self._process.start()
            self._process.call(start_server, self._start, self._config, self._port, self._config.options.key)
        return self

    @property
    def pid(self) -> int:
        """The process id on its machine."""
        return int(self._call("pid"))

    @property
    def alive(self) -> bool:
        """Whether the server runs, on a machine that can be reached."""
        try:
            return bool(self._call("alive"))
        except RolloutError:
            return False

    def cuda(self) -> CudaEnvironment | None:
        """As `ServerProcess.cuda`."""
        environment: CudaEnvironment | None = self._call("cuda")
        return environment

    def require_alive(self, name: str) -> None:
        """As `ServerProcess.require_alive`."""
        self._call("require_alive", name)

    def log_tail(self, lines: int = 25) -> str:
        """As `ServerProcess.log_tail`; empty where its machine is gone."""
        try:
            return str(self._call("log_tail", lines))
        except RolloutError:
            return ""

    def _call(self, name: str, *arguments: object) -> Any:
        with _reached():
            return self._process.call(of_server, name, *arguments)

    def stop(self) -> None:
        """As `ServerProcess.stop`; on a machine that is gone, or out of reach, the server ends by itself."""
        try:
            self._process.call(stop_server)
        except GroupError:
            self._process.close()


@contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except GroupError as error:
        raise RolloutError(f"the machine of a server cannot be reached: {error}") from error


# ------------------------------------------------------------- on the machine


@dataclass
class _Here:
    """The server of this process."""

    server: ServerProcess | None = None
    port: socket.socket | None = None
    """Bound to the server's port, and never listening: the port stays reserved, and the server may listen on it."""


_here = _Here()


def reserve_port(host: str, port: int) -> int:
    """Keep ``port``, or with 0 a free one, for the server of this process; raises `ConfigError` where it is taken."""
    _here.port = bound(host, port)
    reserved: int = _here.port.getsockname()[1]
    return reserved


def start_server(start: Start, config: ServerEngineConfig, port: int, key: str | None) -> None:
    """Start the server of this process by ``start``; raises as it does."""
    if _here.port is None:  # in a process that replaces another one
        reserve_port(config.options.host, port)
    _here.server = start(config, port, key)


def stop_server() -> None:
    """End the server, if there is one; its port stays reserved."""
    server, _here.server = _here.server, None
    if server is not None:
        server.stop()


def of_server(name: str, *arguments: object) -> Any:
    """The attribute ``name`` of the server, or its method's result; raises `RolloutError` where there is none."""
    if _here.server is None:
        raise RolloutError("the server of this process was not started")
    value = getattr(_here.server, name)
    return value(*arguments) if callable(value) else value
