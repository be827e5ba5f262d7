"""The process of one SGLang server, with all its children."""

from __future__ import annotations

import glob
import json
import os
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

from core_rl.config.secret import HIDDEN
from core_rl.distributed.devices import device_type
from core_rl.errors import ConfigError, RolloutError
from core_rl.launch.process_tree import ProcessTree
from core_rl.weight_sync.accelerators import CudaEnvironment
from core_rl_sglang.config import PYTHON_VARIABLE, SglangConfig, SglangOptions
from core_rl_sglang.model import ServedModel

__all__ = ["RunningServer", "ServerProcess", "bound", "free_ports"]

SCRIPT = Path(__file__).with_name("serve.py")
CPU_CACHE_TOKENS = 16384
CONTEXT_MARGIN = 8
"""SGLang keeps some tokens of its context for itself: a prompt is at most 7 shorter (0.5.23, ``tp_worker.py``)."""
GRACE_S = 10.0
MISSING = "ModuleNotFoundError: No module named 'sglang'"
"""The end of the log of a Python that has no SGLang."""


def arguments_of(config: SglangConfig, model: ServedModel, port: int, device: str) -> list[str]:
    """The command-line arguments of a server of ``model`` for its `SglangConfig.of_server`, without the API key.

    Raises `ConfigError` for a model path that SGLang cannot read.
    """
    if glob.escape(str(model.path)) != str(model.path):
        raise ConfigError(
            f"model.path = {str(model.path)!r}: SGLang (0.5.23) reads it as a pattern; rename the directory, "
            "or give it another name with a link"
        )
    context_length, options = model.limits.context_length, config.options
    values = {
        "--model-path": model.path,
        "--host": options.host,
        "--port": port,
        "--device": device,
        "--dtype": config.dtype,
        "--tp-size": config.layout.tp,
        "--random-seed": config.seed,
        "--max-total-tokens": options.max_total_tokens or (CPU_CACHE_TOKENS if device == "cpu" else None),
        "--max-running-requests": options.max_running_requests,
        **(_device_arguments(config) if device == "cuda" else {}),
        "--context-length": None if context_length is None else context_length + CONTEXT_MARGIN,
    }
    given = [part for name, value in values.items() if value is not None for part in (name, str(value))]
    # Requests and responses are token ids, and the first requests are the warm-up.
    given += ["--skip-tokenizer-init", "--skip-server-warmup"]
    if device == "cpu":
        # A fused kernel is not in SGLang's wheel. An idle server leaves the cores to the trainer.
        given += ["--attention-backend", "torch_native", "--sleep-on-idle"]
    else:
        given.append("--enable-memory-saver")  # without it, release_memory() would free nothing
    if model.adapter is not None:
        given += model.adapter.arguments(device)
    return [*given, *options.extra_args]


def _device_arguments(config: SglangConfig) -> dict[str, int | float | None]:
    """Arguments of a server on ``config.devices``, which are its own, and rise in equal steps."""
    first, *others = config.devices
    return {
        "--base-gpu-id": first,
        "--gpu-id-step": others[0] - first if others else None,
        "--mem-fraction-static": config.options.memory_fraction,
    }


def free_ports(options: SglangOptions, count: int) -> tuple[int, ...]:
    """The ports of ``count`` servers; raises `ConfigError` for ``options.ports`` that do not suffice or are taken."""
    if options.ports and len(options.ports) != count:
        raise ConfigError(f"options.ports = {options.ports} for {count} servers; give one for each, or none")
    free = []
    for port in options.ports or [0] * count:  # 0 is any that is free at this moment
        with bound(options.host, port) as probe:
            free.append(int(probe.getsockname()[1]))
    return tuple(free)


def bound(host: str, port: int) -> socket.socket:
    """A socket on ``port`` of ``host`` that does not listen; raises `ConfigError` for a port that is taken."""
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


class RunningServer(Protocol):
    """A launched server, here or on another machine."""

    def cuda(self) -> CudaEnvironment | None:
        """The CUDA environment of its ranks; None without CUDA, and before it is up."""

    @property
    def pid(self) -> int:
        """The process id on its machine."""

    @property
    def alive(self) -> bool:
        """True until the process ends."""

    def require_alive(self, address: str) -> None:
        """Raise `RolloutError` with the end of the log if the server has ended, `ConfigError` if SGLang is missing."""

    def log_tail(self, lines: int = 25) -> str:
        """The last lines that the server wrote, for a message."""

    def stop(self) -> None:
        """End the server and its children; returns when all of them are gone."""


class ServerProcess:
    """A launched server. It ends when `stop` is called, and also when the process that launched it is gone."""

    def __init__(self, config: SglangConfig, model: ServedModel, port: int, key: str | None) -> None:
        """``key`` is the one that clients need, or None."""
        options, device, python = config.options, device_type(config.device), config.server_python
        self._key, self._python = key, python
        arguments = arguments_of(config, model, port, device)
        self._log = _log_file(options.log_path, port)
        self._devices = config.devices
        self._written = tempfile.NamedTemporaryFile(prefix="core-rl-sglang-")  # noqa: SIM115  (closed by `stop`)
        environment = {
            **os.environ,
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            # The client closes idle connections; a server that does would lose a request on its way.
            "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",
        }
        if device == "cpu":
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
            if config.layout.tp > 1:
                environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _shared_cores(config.layout.tp))
        # The path of this process belongs to another environment.
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            environment.pop(name, None)
        try:
            self._process = subprocess.Popen(
                [python, str(SCRIPT), *arguments],
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
                f"options.python: {python!r} cannot be run: {error}; name the Python of the environment that has SGLang"
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
        found = json.loads(text) if text else {"gpus": []}
        if not found["gpus"]:
            return None
        return CudaEnvironment(
            torch=tuple(map(int, found["torch"].split(".")[:2])),
            nccl=tuple(found["nccl"]),
            gpus=tuple(found["gpus"][number] for number in self._devices),
            visible=frozenset(found["gpus"]),
        )

    @property
    def pid(self) -> int:
        """The process id, which is also that of its group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True until the process ends."""
        return self._process.poll() is None

    def require_alive(self, address: str) -> None:
        """Raise `RolloutError` with the end of the log if the server has ended, `ConfigError` if SGLang is missing."""
        code = self._process.poll()
        if code is not None:
            tail = self.log_tail()
            if MISSING in tail:
                raise ConfigError(
                    f"options.python: {self._python!r} has no SGLang; name the Python of an environment that has it "
                    f"there, or in the variable {PYTHON_VARIABLE}"
                )
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise RolloutError(f"SGLang server {address} {how}; {tail}")

    def log_tail(self, lines: int = 25) -> str:
        """The last lines that the server wrote, for a message."""
        size = self._log.seek(0, os.SEEK_END)
        text = os.pread(self._log.fileno(), 64 * 1024, max(0, size - 64 * 1024)).decode(errors="replace")
        if self._key is not None:  # SGLang (0.5.23) logs its arguments with the key
            text = text.replace(self._key, HIDDEN)
        return "\n".join(["the end of its log:", *text.splitlines()[-lines:]])

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


def _log_file(directory: str | None, port: int) -> IO[bytes]:
    if directory is None:
        return tempfile.TemporaryFile()
    Path(directory).mkdir(parents=True, exist_ok=True)
    file = Path(directory, f"sglang-{port}.log")
    log = file.open("ab+")
    file.chmod(0o600)  # before SGLang (0.5.23) logs its arguments with the key
    return log


def _shared_cores(ranks: int) -> str:
    """The cores of each rank of a server: by default SGLang binds each to a NUMA node, and fails with fewer nodes."""
    cores = (
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    shares = [cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks] for rank in range(ranks)]
    return "|".join(",".join(map(str, share or cores[:1])) for share in shares)


def _running(group: int) -> bool:
    """Whether a process of ``group`` is running; a zombie is not."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = file.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False
