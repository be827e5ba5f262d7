"""Pretend machines are machines of their own, fail as machines do, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import pytest
from pretend_machines import Machine, pretend_machines, within

from core_rl.launch.process import start_fork_server


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    with pretend_machines(3, [tmp_path]) as made:
        yield made


def traces() -> dict[str, list[str]]:
    """Possible leftovers of machines on the box: interfaces, mounts, named namespaces, processes."""
    names = [path.name for folder in ("/run/netns", "/var/run/netns") for path in Path(folder).glob("*")]
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            lines.append(path.read_bytes())
    return {
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        "mounts": Path("/proc/self/mounts").read_text().splitlines(),
        "namespaces": names,
        "processes": [str(line) for line in lines if b"sleep\0infinity" in line or b"/tmp/.hosts" in line],
    }


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
