"""Launched servers and the options that concern them. Scripts stand for the servers here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from server_stub import complete, request, wait_for
from sglang_support import API_KEY, backend_of, build, connected, stubs, tiny_model

from core_rl.errors import ConfigError, RolloutError
from core_rl.servers import server_side
from core_rl.servers.process import bound
from core_rl.weight_sync.cuda import CudaEnvironment
from core_rl_sglang.process import SglangConfig, served_model, start


def script(directory: Path, text: str) -> str:
    """An executable that a launched server is, whatever its arguments."""
    file = directory / "server.sh"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_server_log_in_error_hides_key(tmp_path: Path) -> None:
    python = script(tmp_path, "read key; echo \"server_args={'api_key': '$key'}\"; exit 3")
    engine = build(tiny_model(tmp_path), api_key=API_KEY, python=python, log_path=str(tmp_path / "logs"))
    with pytest.raises(RolloutError, match=r"exit code 3[\s\S]*'api_key': '\*\*\*'") as caught:
        engine.initialize()
    assert os.environ["CORE_RL_TEST_SGLANG_KEY"] not in f"{caught.value}{engine.config!r}"
    (log,) = (tmp_path / "logs").iterdir()
    assert log.stat().st_mode & 0o077 == 0, "SGLang writes its key there"


def test_unset_key_is_named_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORE_RL_TEST_SGLANG_KEY")
    engine = build(tiny_model(tmp_path), api_key=API_KEY, python=script(tmp_path, "exit 3"))
    with pytest.raises(ConfigError, match="CORE_RL_TEST_SGLANG_KEY is not set"):
        engine.initialize()


@pytest.mark.parametrize(
    "argument",
    [
        "--api-key=k",
        "--api_key",
        "--host",
        "--port",
        "--admin-api-key",
        "--mem-fraction-static",
        "--base-gpu-id=1",
    ],
)
def test_arguments_duplicating_fields_are_refused(tmp_path: Path, argument: str) -> None:
    with pytest.raises(ConfigError, match=r"extra_args.*set (options\.)?\w+ instead of --"):
        build(tiny_model(tmp_path), extra_args=("--chunked-prefill-size", "64", argument))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "server.example"])
def test_reachable_server_needs_a_key(tmp_path: Path, host: str) -> None:
    model = tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=rf"host = '{host}' without api_key: whoever reaches .* run code"):
        build(model, host=host)
    build(model, host=host, api_key=API_KEY)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_a_server_on_the_loopback_needs_none(tmp_path: Path, host: str) -> None:
    build(tiny_model(tmp_path), host=host)


def test_a_python_without_sglang_is_named(tmp_path: Path) -> None:
    """This environment's: SGLang has another."""
    engine = build(tiny_model(tmp_path), python=sys.executable)
    with pytest.raises(
        ConfigError, match=r"has no module 'sglang'.*; name the Python .* CORE_RL_SGLANG_PYTHON"
    ):
        engine.initialize()
    engine.destroy()


LISTENS = """
import socket, sys
address = ("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))
try:
    socket.socket().bind(address)
    print("anybody may take the port")
except OSError:
    server = socket.create_server(address)
    print("only the server gets the port")
sys.exit(3)
"""


def test_last_error_before_the_tail_is_shown(tmp_path: Path) -> None:
    """Servers of several processes end with an error that only refers to the cause."""
    lines = "for n in $(seq 60); do echo line $n; done"
    python = script(
        tmp_path,
        f"echo '(worker) ValueError: too little cache'; {lines}; echo 'RuntimeError: see above'; exit 1",
    )
    engine = build(tiny_model(tmp_path), python=python)
    with pytest.raises(
        RolloutError, match=r"exit code 1; \(worker\) ValueError: too little cache\nthe end of its log"
    ):
        engine.launch_server()
    engine.destroy()


def test_a_crash_is_logged_with_its_signal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its connections say only that it has disconnected."""
    config = build(tiny_model(tmp_path), python=script(tmp_path, "echo a bad kernel; kill -SEGV $$")).config
    assert isinstance(config, SglangConfig)
    crashed = start(config.of_server(0), served_model(config.model), 1, None)
    wait_for(lambda: not crashed.alive)
    again: Any = SimpleNamespace(alive=True, require_alive=lambda name: None, stop=lambda: None)
    with stubs(tmp_path) as (stub,), connected([stub]) as engine:
        server = backend_of(engine).servers[0]
        server.process, server.start = crashed, lambda: again
        stub.stop()
        stub.start()
        complete(engine, request())
    assert "was killed by SIGSEGV; the end of its log:\na bad kernel" in caplog.text


def test_server_port_is_reserved_until_listening(tmp_path: Path) -> None:
    """A port that was only looked up was taken by a process group while the server was starting."""
    (tmp_path / "listens.py").write_text(LISTENS)
    engine = build(
        tiny_model(tmp_path), python=script(tmp_path, f'exec {sys.executable} {tmp_path}/listens.py "$@"')
    )
    with pytest.raises(RolloutError, match="only the server gets the port"):
        engine.launch_server()
    engine.destroy()


def test_server_stops_with_failed_sibling(tmp_path: Path) -> None:
    reserved, pid = [bound("127.0.0.1", 0) for _ in range(2)], tmp_path / "pid"
    ports = tuple(port.getsockname()[1] for port in reserved)
    # The first ends as soon as the second is running.
    dies = f"while [ ! -s {pid} ]; do sleep 0.02; done; exit 3"
    python = script(
        tmp_path, f'case "$*" in *"--port {ports[0]}"*) {dies};; esac; echo $$ > {pid}; exec sleep 600'
    )
    for launch in (True, False):
        pid.unlink(missing_ok=True)
        engine = build(tiny_model(tmp_path), dp=2, python=python, ports=ports)
        with pytest.raises(RolloutError, match=rf"127.0.0.1:{ports[0]} ended with exit code 3"):
            engine.launch_server() if launch else engine.initialize()
        engine.destroy()
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
    for port in reserved:
        port.close()


def test_server_environment_names_libraries_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "environment"
    server_side.write_environment(str(file))
    assert json.loads(file.read_text()) == {"torch": torch.__version__, "nccl": None, "gpus": []}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda number: SimpleNamespace(uuid=f"gpu-{number}")
    )
    monkeypatch.setattr(server_side, "nccl_version", lambda: (2, 28, 9))
    server_side.write_environment(str(file))
    model = tiny_model(tmp_path)
    python = script(tmp_path, f'read key; read file; cp {file} "$file"; exec sleep 600')
    config = build(model, dp=2, python=python).config
    assert isinstance(config, SglangConfig)
    process = start(config.of_server(1), served_model(config.model), 1, None)
    try:
        wait_for(lambda: process.cuda() is not None)
        actual = process.cuda()
    finally:
        process.stop()
    expected = frozenset({"gpu-0", "gpu-1", "gpu-2"})
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert actual == CudaEnvironment(torch=version, nccl=(2, 28, 9), gpus=("gpu-1",), visible=expected)
