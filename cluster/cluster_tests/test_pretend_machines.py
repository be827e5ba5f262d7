"""Pretend machines are machines of their own, fail as machines do, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
from pretend_machines import DRIVER_ADDRESS, Machine, pretend_machines, within

from core_rl.launch.process import start_fork_server

PING = ["ping", "-c1", "-W1", "-q"]
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1)"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    with pretend_machines(3, [tmp_path]) as made:
        yield made


def traces() -> dict[str, list[str]]:
    """Possible leftovers of machines on the box: interfaces, mounts, named namespaces, processes."""
    names = [path.name for folder in ("/run/netns", "/var/run/netns") for path in Path(folder).glob("*")]
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return {
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        "mounts": Path("/proc/self/mounts").read_text().splitlines(),
        "namespaces": names,
        "processes": [str(line) for line in lines if b"sleep\0infinity" in line or b"/tmp/.hosts" in line],
    }


def reaches(machine: Machine, server: socket.socket) -> bool:
    host, port = server.getsockname()[:2]
    process = machine.run([sys.executable, "-S", "-c", CONNECT, host, str(port)])
    process.communicate(timeout=30)
    return process.returncode == 0


def test_machines_have_separate_addresses_files_and_processes(
    machines: list[Machine], tmp_path: Path
) -> None:
    (tmp_path / "shared").write_text("for all")
    for machine in machines:
        assert machine.output(["hostname"]).strip() == machine.hostname == f"node{machine.number}"
        assert machine.address in machine.output(["ip", "-o", "-4", "addr", "show", "eth0"])
        assert machine.output(["cat", str(tmp_path / "shared")]) == "for all"
        machine.output(["touch", "/tmp/mine", "/dev/shm/mine"])
        assert len(machine.output(["ps", "-e", "-o", "pid="]).split()) == 3  # the first two, and ps
    machines[0].output(["touch", "/tmp/other", "/dev/shm/other"])
    assert "other" not in machines[1].output(["ls", "/tmp", "/dev/shm"])
    assert not Path("/tmp/mine").exists()
    assert not Path("/dev/shm/mine").exists()


def test_hostnames_resolve_as_on_debian(machines: list[Machine]) -> None:
    command = ["getent", "ahostsv4"]
    assert machines[0].output([*command, "node0"]).startswith("127.0.1.1 ")
    assert machines[0].output([*command, "node1"]).startswith(machines[1].address)


def test_ranks_of_the_driver_are_in_its_network() -> None:
    def network_of_fork_server() -> Path:
        start_fork_server()
        pid: int = getattr(forkserver._forkserver, "_forkserver_pid")  # noqa: B009 - typeshed lacks it
        return Path(f"/proc/{pid}/ns/net").readlink()

    local = Path("/proc/thread-self/ns/net")
    for _ in range(2):
        with pretend_machines(1):
            assert network_of_fork_server() == local.readlink()
    assert network_of_fork_server() == local.readlink()


def test_cut_cables_separate_machines_until_mended(machines: list[Machine]) -> None:
    with socket.create_server((DRIVER_ADDRESS, 0)) as server:
        assert all(reaches(machine, server) for machine in machines)
        machines[1].cut()
        assert [reaches(machine, server) for machine in machines] == [True, False, True]
        machines[1].mend()
        assert within(lambda: reaches(machines[1], server))


def test_power_failures_send_no_last_packet(machines: list[Machine]) -> None:
    wait = f"{CONNECT}.recv(1)".replace("timeout=1", "timeout=60")
    with socket.create_server((DRIVER_ADDRESS, 0)) as server:
        port = server.getsockname()[1]
        process = machines[1].run([sys.executable, "-S", "-c", wait, DRIVER_ADDRESS, str(port)])
        connection, _ = server.accept()
        with connection:
            assert any(" -S -c " in line for line in machines[1].processes().values())
            machines[1].kill()
            assert process.wait(timeout=5) != 0
            assert machines[1].processes() == {}
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                connection.recv(1)
    assert machines[0].output(["hostname"]).strip() == "node0"
    process.communicate()


@pytest.mark.parametrize("failure", [False, True])
def test_nothing_is_left(failure: bool) -> None:
    before = traces()
    try:
        with pretend_machines(3) as machines:
            machines[0].run(["sleep", "300"]).stdout.close()  # type: ignore[union-attr]
            machines[1].kill()
            machines[2].cut()
            if failure:
                raise KeyError("a test failed")
    except KeyError:
        assert failure
    assert within(lambda: traces() == before), traces()


def test_nothing_is_left_of_killed_makers() -> None:
    before = traces()
    script = (
        "import sys, time; from pretend_machines import pretend_machines\n"
        "with pretend_machines(2) as machines:\n"
        "    machines[0].run(['sleep', '300'])\n"
        "    print('up', flush=True); time.sleep(300)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    maker = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    assert maker.stdout.readline() == "up\n"
    assert traces()["processes"] != before["processes"]
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    assert within(lambda: traces() == before), traces()
