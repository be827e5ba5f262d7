"""Servers on the machines of a cluster. A local Ray and a script for SGLang stand for them here."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_server import LABEL, MODEL, gone, parent, scripted_server
from server_stub import complete, request, wait_for
from sglang_support import API_KEY, backend_of, build, stubs, tiny_model

from core_rl.errors import ConfigError, RolloutError, WeightsError
from core_rl.launch.machines import server_processes
from core_rl.servers.process import bound, reserve_port
from core_rl.servers.weights import require_shared_memory_with
from core_rl_cluster import RayHosts
from core_rl_sglang.process import SglangConfig

pytestmark = pytest.mark.nightly

META = {
    "finish_reason": {"type": "length"},
    "output_token_logprobs": [[-0.5, 7, None]] * 2,
    "weight_versions": [{"version": LABEL, "start": 0, "end": 2}],
}
RESPONSES = {
    "/model_info": {"model_path": MODEL, "weight_version": "default"},
    "/server_info": {"tp_size": 1, "device": "cpu"},
    "/generate": {"output_ids": [7, 7], "meta_info": META},
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[RayHosts]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False)
    with RayHosts(1, 2) as made:
        yield made
    ray.shutdown()


def test_servers_end_with_engine_on_machines(hosts: RayHosts, tmp_path: Path) -> None:
    python = scripted_server(tmp_path, RESPONSES, "--model-path")
    engine = build(tiny_model(tmp_path), dp=2, api_key=API_KEY, python=python)
    try:
        addresses = engine.launch_server(processes=server_processes(hosts, 2))
        engine.initialize(addresses)
        servers = [server.process for server in backend_of(engine).servers]
        pids = [server.pid for server in servers if server is not None]
        ranks = [parent(pid) for pid in pids]
        responses = complete(engine, *[request(1, number, max_new_tokens=2) for number in range(4)])
        assert [response.output_ids for response in responses] == [(7, 7)] * 4
        # Where the process of a server is gone, another one starts it at the same address.
        os.kill(ranks[0], signal.SIGKILL)
        wait_for(lambda: gone(pids[0]))
        responses = complete(engine, *[request(2, number, max_new_tokens=2) for number in range(4)])
        assert [response.output_ids for response in responses] == [(7, 7)] * 4
        first, second = [server.process for server in backend_of(engine).servers]
        assert first is not None
        assert second is not None
        wait_for(lambda: first.alive, 30)
        left = [first.pid, second.pid]
        assert first.pid != pids[0]
        assert second.pid == pids[1]
    finally:
        engine.destroy()
    wait_for(lambda: all(map(gone, left)))


def test_early_server_exit_reports_log(hosts: RayHosts, tmp_path: Path) -> None:
    file = tmp_path / "server.sh"
    file.write_text("#!/bin/sh\necho no such device; exit 3\n")
    file.chmod(0o755)
    engine = build(tiny_model(tmp_path), api_key=API_KEY, python=str(file))
    with pytest.raises(RolloutError, match=r":\d+ ended with exit code 3[\s\S]*no such device"):
        engine.launch_server(processes=server_processes(hosts, 1))
    engine.destroy()


def test_servers_on_machines_need_a_key(tmp_path: Path) -> None:
    config = build(tiny_model(tmp_path)).config
    assert isinstance(config, SglangConfig)
    with pytest.raises(ConfigError, match=r"'10.0.0.5' without api_key.*set api_key to '\$\{env:NAME\}'"):
        config.on_machine(0, (0,), "10.0.0.5")


def test_server_devices_share_a_machine() -> None:
    hosts = RayHosts(2, 1)
    with pytest.raises(ConfigError, match=r"servers \[0\] of 2 ranks would lie on two machines each"):
        server_processes(hosts, 1, 2)
    with pytest.raises(ConfigError, match="a layout of 3 ranks"):
        server_processes(hosts, 3)


def test_reserved_port_is_exclusive() -> None:
    port = reserve_port("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        socket.socket().bind(("127.0.0.1", port))
    with bound("127.0.0.1", port) as server:
        server.listen()


def test_shared_memory_stays_on_its_machine(tmp_path: Path) -> None:
    with stubs(tmp_path) as (stub,):
        engine = build(stub.model, addresses=(stub.address,), take_over=True)
        engine.initialize()
        servers = backend_of(engine).servers
        require_shared_memory_with(servers)
        servers[0].host = "192.0.2.1"
        with pytest.raises(WeightsError, match=r"'tensor' goes through the memory of one machine"):
            require_shared_memory_with(servers)
        engine.destroy()
