"""A launched server with all its children, here or on another machine, and the checks of a machine before that."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

from core_rl.backend.inference_protocols import MachineProcess
from core_rl.config.secret import HIDDEN
from core_rl.distributed.sockets import socket_directory
from core_rl.errors import ConfigError, GroupError, RolloutError
from core_rl.launch.process_tree import ProcessTree
from core_rl.servers.config import ServerEngineConfig, ServerOptions
from core_rl.weight_sync.cuda import CudaEnvironment

__all__ = [
    "PlacedServer",
    "RunningServer",
    "ServerProcess",
    "bound",
    "machine_problems",
    "reserve_ports",
    "server_environment",
]

GRACE_S = 10.0
SERVER_SIDE = Path(__file__).with_name("server_side.py")
"""First part of a server's script, which finds it in the environment variable CORE_RL_SERVER_SIDE."""
LIMIT_S = 60.0
ERROR_LINE = re.compile(r"\b\w*(Error|Exception): \S")
SIGNALS = {number: f"signal {number}" for number in range(signal.NSIG)} | {
    s.value: s.name for s in signal.Signals
}
HAS_MODULE = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


def server_environment(added: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a server's process: this process's and ``added``, without paths of this environment."""
    environment = {**os.environ, "TMPDIR": socket_directory(), **added}
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        environment.pop(name, None)
    return environment


def reserve_ports(options: ServerOptions, count: int, until: ExitStack) -> tuple[int, ...]:
    """The ports of ``count`` servers, reserved until ``until`` closes.

    A port that is only looked up may be gone when a server listens on it, many seconds later: each process
    group listens on several. Raises `ConfigError` for ``options.ports`` that do not suffice or are taken.
    """
    if options.ports and len(options.ports) != count:
        raise ConfigError(f"options.ports = {options.ports} for {count} servers; give one for each, or none")
    ports = options.ports or [0] * count  # 0 is any that is free at this moment
    return tuple(int(until.enter_context(bound(options.host, port)).getsockname()[1]) for port in ports)


def bound(host: str, port: int) -> socket.socket:
    """A socket on ``port`` of ``host`` that does not listen, so that a server may; the port stays reserved.

    Raises `ConfigError` for a port that is taken.
    """
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    except OSError as error:
        probe.close()
        raise ConfigError(
            f"options.ports: port {port} of {host} cannot be listened on ({error.strerror}); choose another, or leave "
            "'ports' empty"
        ) from error
    return probe


class ServerProcess:
    """A launched server. It ends when `stop` is called, and also when the process that launched it is gone."""

    def __init__(
        self,
        config: ServerEngineConfig,
        port: int,
        key: str | None,
        *,
        script: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        gpus: Sequence[int] | None = None,
    ) -> None:
        """Run ``script``, which calls `server_side.begin`, for the `ServerEngineConfig.of_server` of one server.

        ``key`` is the API key, or None; ``environment`` has additional variables. ``gpus`` are the ranks' GPUs by the
        numbers that the server sees, by default ``config.devices``.
        """
        self._gpus = config.devices if gpus is None else gpus
        self._key, self._config = key, config
        self._log = _log_file(config.options.log_path, f"{config.product.lower()}-{port}.log")
        self._written = tempfile.NamedTemporaryFile(prefix="core-rl-server-")  # noqa: SIM115  (closed by `stop`)
        environment = server_environment({**environment, "CORE_RL_SERVER_SIDE": str(SERVER_SIDE)})
        try:
            self._process = subprocess.Popen(
                [config.server_python, str(script), *arguments],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=tempfile.gettempdir(),
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            self._written.close()
            raise ConfigError(
                f"options.python: {config.server_python!r} cannot be run: {error}; name the Python of the "
                f"environment that has {config.product}"
            ) from error
        self._tree = ProcessTree(self._process.pid)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which `require_alive` reports
            # Not arguments, which every user of the machine can read.
            self._process.stdin.write(f"{self._key or ''}\n{self._written.name}\n".encode())
            self._process.stdin.flush()

    def cuda(self) -> CudaEnvironment | None:
        """The CUDA environment of its ranks; None without CUDA, and before it is up."""
        text = Path(self._written.name).read_text(encoding="utf-8")
        environment = json.loads(text) if text else {"gpus": []}
        if not environment["gpus"]:
            return None
        return CudaEnvironment(
            torch=tuple(map(int, environment["torch"].split(".")[:2])),
            nccl=tuple(environment["nccl"]),
            gpus=tuple(environment["gpus"][number] for number in self._gpus),
            visible=frozenset(environment["gpus"]),
        )

    @property
    def pid(self) -> int:
        """The process id, which is also that of its group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True until the process ends."""
        return self._process.poll() is None

    def require_alive(self, name: str) -> None:
        """Raise `RolloutError` with the end of the log if the server has ended, `ConfigError` where it is missing."""
        code = self._process.poll()
        if code is not None:
            tail = self.log_tail()
            if f"ModuleNotFoundError: No module named '{self._config.module}'" in tail:
                raise ConfigError(_missing(self._config))
            how = f"was killed by {SIGNALS[-code]}" if code < 0 else f"ended with exit code {code}"
            raise RolloutError(f"{name} {how}; {tail}")

    def log_tail(self, lines: int = 25) -> str:
        """The last lines that the server wrote, for a message, behind the last error before them.

        A server of several processes ends with an error of the first, which refers to the cause in another.
        """
        size = self._log.seek(0, os.SEEK_END)
        text = os.pread(self._log.fileno(), 64 * 1024, max(0, size - 64 * 1024)).decode(errors="replace")
        if self._key is not None:  # servers may log their arguments with the key
            text = text.replace(self._key, HIDDEN)
        written = text.splitlines()
        causes = [line.strip() for line in written[:-lines] if ERROR_LINE.search(line)]
        return "\n".join([*causes[-1:], "the end of its log:", *written[-lines:]])

    def stop(self) -> None:
        """End the server and its children; returns when all of them are gone."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._tree.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        deadline = time.monotonic() + GRACE_S
        while _running(self.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._tree.close()
        self._log.close()
        self._written.close()


Start: TypeAlias = Callable[[Any, int, str | None], ServerProcess]
"""Function of a module that starts the server of a config, on a port, for clients with the API key.

Raises `ConfigError`, also for a model that its machine lacks.
"""


class PlacedServer:
    """A server in ``process``, on its machine, with the methods of `ServerProcess`.

    Calls raise `RolloutError` where the machine or the process is gone.
    """

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
        environment: CudaEnvironment | None = self._call("cuda")
        return environment

    def require_alive(self, name: str) -> None:
        self._call("require_alive", name)

    def log_tail(self, lines: int = 25) -> str:
        """Empty where its machine is gone."""
        try:
            return str(self._call("log_tail", lines))
        except RolloutError:
            return ""

    def _call(self, name: str, *arguments: object) -> Any:
        with _reached():
            return self._process.call(of_server, name, *arguments)

    def stop(self) -> None:
        """On a machine that is gone, or out of reach, the server ends by itself."""
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


@dataclass
class _LocalServer:
    """The server of this process."""

    server: ServerProcess | None = None
    port: socket.socket | None = None
    """Bound to the server's port, and never listening: the port stays reserved, and the server may listen on it."""


_local_server = _LocalServer()


def reserve_port(host: str, port: int) -> int:
    """Keep ``port``, or with 0 a free one, for the server of this process; raises `ConfigError` where it is taken."""
    _local_server.port = bound(host, port)
    reserved: int = _local_server.port.getsockname()[1]
    return reserved


def start_server(start: Start, config: ServerEngineConfig, port: int, key: str | None) -> None:
    """Start the server of this process by ``start``; raises as it does."""
    if _local_server.port is None:  # in a process that replaces another one
        reserve_port(config.options.host, port)
    _local_server.server = start(config, port, key)


def stop_server() -> None:
    """End the server, if there is one; its port stays reserved."""
    server, _local_server.server = _local_server.server, None
    if server is not None:
        server.stop()


def of_server(name: str, *arguments: object) -> Any:
    """The attribute ``name`` of the server, or its method's result; raises `RolloutError` where there is none."""
    if _local_server.server is None:
        raise RolloutError("the server of this process was not started")
    value = getattr(_local_server.server, name)
    return value(*arguments) if callable(value) else value


RunningServer: TypeAlias = ServerProcess | PlacedServer
"""A launched server, here or on another machine."""


def _log_file(directory: str | None, name: str) -> IO[bytes]:
    if directory is None:
        return tempfile.TemporaryFile()
    Path(directory).mkdir(parents=True, exist_ok=True)
    file = Path(directory, name)
    log = file.open("ab+")
    file.chmod(0o600)  # before a server logs its arguments with the key
    return log


def _running(group: int) -> bool:
    """Whether a process of ``group`` is running; a zombie is not."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = file.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


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
        return _missing(config)
    return None


def _missing(config: ServerEngineConfig) -> str:
    without = " (servers get no PYTHONPATH)" if "PYTHONPATH" in os.environ else ""
    return f"options.python: {config.server_python!r} has no module {config.module!r}{without}; {_remedy(config)}"


def _remedy(config: ServerEngineConfig) -> str:
    return f"name the Python of an environment with {config.product} there, or in the variable {config.python_variable}"
