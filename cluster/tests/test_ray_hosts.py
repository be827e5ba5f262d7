"""Hosts on a Ray cluster, as far as that shows without one."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import pytest

from core_rl.errors import ConfigError, MissingPackage
from core_rl_cluster.ray import RayHosts
from core_rl_cluster.ray_nodes import AgentActor, shortage, silent_nodes


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


def test_an_address_of_ray_client_is_refused() -> None:
    with pytest.raises(ConfigError, match="run this program on a node of the cluster"):
        RayHosts(2, 1, ray_address="ray://10.0.0.1:10001")


def test_agents_of_ray_get_keys_and_report_their_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = "import os, sys; print(os.environ['KEY'], sys.argv[1]); sys.exit(sys.stdin.closed or 3)"
    end = AgentActor().run(["-c", code, "an argument"], {"KEY": "a secret"})
    assert end == "ended with exit code 3; the end of its output:\na secret an argument\n"
    assert capfd.readouterr().out == "a secret an argument\n"  # which Ray shows at the driver


def test_actors_end_without_a_driver() -> None:
    script = (
        "import time; from core_rl_cluster import ray_nodes; ray_nodes.LINGER_S = 0.1\n"
        "assert ray_nodes.AgentActor().serve(['-c', ''], {}).startswith('ended with exit code 0')\n"
        "time.sleep(600)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def bare(address: str, port: int, alive: bool = True) -> dict[str, object]:
    return {"NodeManagerAddress": address, "NodeManagerPort": port, "Alive": alive}


def test_nodes_without_a_listener_are_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as raylet, socket.socket() as bound:
        bound.bind(("127.0.0.2", 0))
        target, gone = raylet.getsockname()[1], bound.getsockname()[1]
        assert silent_nodes([bare("127.0.0.1", target)]) == []
        assert silent_nodes([bare("127.0.0.1", target), bare("127.0.0.2", gone)]) == ["127.0.0.2"]
        assert silent_nodes([bare("127.0.0.2", gone, alive=False)]) == []
    assert silent_nodes([]) == []
