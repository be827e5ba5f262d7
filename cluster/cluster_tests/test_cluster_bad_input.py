"""Machines that cannot be used: one error in time with a remedy, and no process left."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence

import group_support as support
import pytest
from cluster_hosts import KEY_VARIABLE, PORT, agent_command
from pretend_machines import DRIVER_ADDRESS, Machine, pretend_machines, within

from core_rl.errors import ClusterError, ConfigError
from core_rl_cluster.attach import AttachHosts

KEY = secrets.token_hex(32)
OTHER_VERSION = """
import sys, core_rl.version
core_rl.version.__version__ = "0.0.7"
from core_rl.cli import main
sys.argv[0] = "core-rl"
main()
"""
PRINT_ADDRESS = "from core_rl_cluster.network import own_address; print(own_address('address'))"


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    with pretend_machines(2) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(machines: list[Machine], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    yield
    assert within(lambda: not any(machine.processes() for machine in machines))


def attach(wait_s: float = 60.0, machines: int = 2) -> AttachHosts:
    return AttachHosts(machines, 2, address=DRIVER_ADDRESS, port=PORT, wait_s=wait_s, lease_s=10)


def start(machine: Machine, *arguments: str, key: str = KEY) -> subprocess.Popen[str]:
    return machine.run(agent_command(*arguments), {KEY_VARIABLE: key})


def printed(agents: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Output of agents that ended by themselves."""
    return [agent.communicate(timeout=30)[0] for agent in agents]


def test_a_wrong_key_is_named_on_both_sides(machines: list[Machine]) -> None:
    agents = [start(machines[0]), start(machines[1], key=secrets.token_hex(32))]
    with pytest.raises(ClusterError, match=rf"{machines[1].address}: a machine connected with another key"):
        attach().open()
    assert "the driver has another key" in printed(agents)[1]
    assert agents[1].returncode != 0


def test_different_versions_are_named_with_their_machine(machines: list[Machine]) -> None:
    words = agent_command()
    second = [sys.executable, "-c", OTHER_VERSION, *words[words.index("agent") :]]
    agents = [start(machines[0]), machines[1].run(second, {KEY_VARIABLE: KEY})]
    with pytest.raises(ClusterError, match=r"node1 \(10\.77\.0\.11\) was refused: it has core_rl 0\.0\.7"):
        attach().open()
    assert "install the same versions" in " ".join(printed(agents)[1].split())


def test_machines_with_equal_numbers_are_refused(machines: list[Machine]) -> None:
    agents = [start(machine, "--machine=1") for machine in machines]
    with pytest.raises(ClusterError, match="there is a machine 1 already"):
        attach().open()
    printed(agents)


def test_missing_agents_are_reported_in_time(machines: list[Machine]) -> None:
    agent = start(machines[0])
    with pytest.raises(
        ClusterError, match=r"1 of 2 machines came to 10\.77\.0\.1:29400 within 8 s; there: machine 0"
    ):
        attach(wait_s=8).open()
    printed([agent])


def test_an_agent_without_a_driver_ends_in_time(machines: list[Machine]) -> None:
    agent = start(machines[0], "--wait=1")
    assert "no driver at 10.77.0.1, port 29400 within 1 s" in " ".join(printed([agent])[0].split())
    assert agent.returncode != 0


def test_a_port_in_use_is_named(machines: list[Machine]) -> None:
    refused = pytest.raises(ConfigError, match=rf"{DRIVER_ADDRESS}, port {PORT}: .*in use.*another port")
    with socket.create_server((DRIVER_ADDRESS, PORT)), refused:
        attach().open()


def test_an_address_of_no_interface_is_named(machines: list[Machine]) -> None:
    hosts = AttachHosts(1, address="192.0.2.7", port=PORT)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.7"):
        hosts.open()


@pytest.mark.parametrize(
    ("degrees", "settings", "message"),
    [
        ({"dp": 5}, {}, r"a layout of 5 ranks, and machines \[0, 1\] have places for 4, 2 each"),
        ({"dp": 2}, {"machines": [1, 2]}, r"machines = \[1, 2\]: there are \[0, 1\]"),
        ({"dp": 2}, {"machines": [1, 1]}, r"machines = \[1, 1\]: there are \[0, 1\]"),
        ({"dp": 3}, {"devices": [0]}, r"a layout of 3 ranks, .* places for 2, 1 each"),
        ({"dp": 2}, {"devices": [0, 0]}, r"devices = \[0, 0\]; name different devices"),
    ],
)
def test_too_few_places_are_refused_before_anything_starts(
    degrees: dict[str, int], settings: dict[str, list[int]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        support.echo_group(support.SPEC, support.config(**degrees), hosts=attach(), **settings)
    with socket.create_server((DRIVER_ADDRESS, PORT)):
        pass  # no listener there


def test_strangers_on_the_port_change_nothing(machines: list[Machine]) -> None:
    hosts = attach(machines=1)
    agent = start(machines[0])
    sockets = []
    with hosts:
        for message in (b"GET / HTTP/1.1\r\n\r\n", b"", secrets.token_bytes(5000)):
            sockets.append(socket.create_connection((DRIVER_ADDRESS, PORT)))
            sockets[-1].sendall(message)
        with support.echo_group(support.SPEC, support.config(dp=2), hosts=hosts, timeout_s=60) as group:
            assert group.run(support.whoami) == [(0,), (1,)]
    for sock in sockets:
        sock.close()
    printed([agent])


def test_terminated_agents_end_and_are_named(machines: list[Machine]) -> None:
    agent = start(machines[0])
    with attach(machines=1) as hosts:
        assert within(lambda: any("forkserver" in line for line in machines[0].processes().values()), 20)
        (pid,) = (pid for pid, line in machines[0].processes().items() if " agent " in line)
        os.kill(pid, signal.SIGTERM)
        assert within(lambda: not hosts.found)
        with pytest.raises(ClusterError, match=r"machine 0 \(node0, .*which got SIGTERM"):
            hosts.address_of(0)
        assert within(lambda: not machines[0].processes())
    printed([agent])


def test_loopback_host_names_are_no_addresses(machines: list[Machine]) -> None:
    command = [sys.executable, "-c", PRINT_ADDRESS]
    assert machines[0].output(command).strip() == machines[0].address  # by the default route
    without = f'ip route del default; exec {sys.executable} -c "{PRINT_ADDRESS}"'
    process = machines[1].run(["sh", "-c", without])
    (text,) = printed([process])
    assert re.search(r"'node1' means 127\.0\.1\.1, which other machines cannot reach.* set address", text)
