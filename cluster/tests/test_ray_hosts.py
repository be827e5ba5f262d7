"""Hosts on a Ray cluster, as far as that shows without one."""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

import pytest

from core_rl.distributed.authentication import new_key, present_key
from core_rl.distributed.channel import Channel
from core_rl.errors import ConfigError, GroupError, MissingPackage
from core_rl_cluster import RayHosts
from core_rl_cluster.machine import accept, environment_of_ranks, interface_of
from core_rl_cluster.ray import shortage


def node(number: int, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    """A node as ``ray.nodes()`` describes it."""
    return {
        "Alive": alive,
        "NodeManagerAddress": f"10.0.0.{number}",
        "NodeManagerHostname": f"node{number}",
        "Resources": {"memory": 1e9, **resources},
    }


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (
            [node(1, CPU=8, GPU=8), node(0, CPU=8)],
            "Of 2 nodes 1 are large enough: add nodes, or ask for fewer machines or resources\n"
            "  node0 (10.0.0.0) lacks GPU 4: CPU 8, GPU 0\n"
            "  node1 (10.0.0.1) is large enough: CPU 8, GPU 8",
        ),
        (
            [node(0, CPU=8, GPU=8), node(1, alive=False)],
            "Of 2 nodes 1 are large enough: add nodes, or ask for fewer machines or resources\n"
            "  node0 (10.0.0.0) is large enough: CPU 8, GPU 8\n"
            "  node1 (10.0.0.1) is not alive: CPU 0, GPU 0",
        ),
        (
            [node(0, CPU=8, GPU=8), node(1, CPU=4, GPU=4)],
            "Of 2 nodes 2 are large enough, and others use them: CPU 10, GPU 3 are free in all. End other "
            "jobs, or wait longer (wait_s)\n"
            "  node0 (10.0.0.0) is large enough: CPU 8, GPU 8\n"
            "  node1 (10.0.0.1) is large enough: CPU 4, GPU 4",
        ),
    ],
)
def test_shortages_show_each_node_and_the_cause(nodes: list[dict[str, Any]], expected: str) -> None:
    message = shortage(nodes, {"CPU": 10.0, "GPU": 3.0}, 2, {"CPU": 4, "GPU": 4}, 300.0)
    assert message == f"Ray did not give 2 nodes with CPU 4, GPU 4 each within 300 s. {expected}"


def test_without_ray_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackage, match=r"pip install 'core-rl\[ray\]'"):
        RayHosts(2, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "ray://10.0.0.1:10001"}, "run this program on a node of the cluster"),
        ({"machines": 0}, "machines = 0; it must be positive"),
        ({"lease_s": 0.0}, "lease_s = 0.0; it must be positive"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RayHosts(**{"machines": 2, **settings})


def test_strangers_on_a_port_change_nothing() -> None:
    key, deadline = new_key(), time.monotonic() + 30
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = listener.getsockname()
        stranger, other, driver = (socket.create_connection(endpoint) for _ in range(3))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        threading.Thread(target=_present, args=(other, new_key(), deadline)).start()
        threading.Thread(target=_present, args=(driver, key, deadline)).start()
        with accept(listener, key, deadline) as taken:
            assert taken.getpeername() == driver.getsockname()
        with pytest.raises(GroupError, match=r"the driver did not connect to 127\.0\.0\.1 in time"):
            accept(listener, key, time.monotonic() + 0.1)
    for end in (stranger, other, driver):
        end.close()


def _present(sock: socket.socket, key: bytes, deadline: float) -> None:
    try:
        present_key(Channel(sock), key, deadline)
    except GroupError:
        sock.close()


def test_ranks_leave_variables_of_launchers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_PROCID", "RAY_AUTH_TOKEN", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")
    environ = environment_of_ranks({"FLAG": "2"}, "127.0.0.1")
    assert not {"SLURM_PROCID", "RAY_AUTH_TOKEN", "WORLD_SIZE"} & environ.keys()
    assert (environ["CUDA_VISIBLE_DEVICES"], environ["FLAG"]) == ("1", "2")
    assert environ["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.1") == "lo"
