"""Machines of a cluster on one Linux box, made of namespaces, and failures of them.

Each has an address, a hostname, processes, ``/tmp`` and ``/dev/shm`` of its own, and shares other files with the box.
The process that makes them is one more machine of their network, which reaches nothing else meanwhile. No namespace
has a name, and every process is tied to the maker: nothing is left, also after a ``kill -9`` of it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import NoReturn

import pytest

from core_rl.launch.process import end_fork_server

NETWORK = "10.77.0"
DRIVER_ADDRESS = f"{NETWORK}.1"
"""The address of the process that makes the machines."""
SOON_S = 60.0
"""Far more than any short wait takes: a busy machine fails no test."""
CLONE_NEWNET = 0x40000000
TOOLS = ("bash", "hostname", "ip", "mount", "nsenter", "setpriv", "unshare")
UNSHARE = ("unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child")
REPOSITORY = Path(__file__).parents[2]

# The first process of a machine, with its hostname, its /etc/hosts and paths to share as arguments. Its own files
# hide those of the box, so shared files of /tmp are put into the new one first.
INIT = """
set -e
read -r pid _ </proc/self/stat
hostname "$1"
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /mnt
for path in "${@:3}"; do
    case "$path" in /tmp/*)
        mkdir -p "/mnt${path#/tmp}"
        mount --rbind "$path" "/mnt${path#/tmp}"
    esac
done
mount --move /mnt /tmp
chmod 1777 /tmp
printf %s "$2" >/tmp/.hosts
mount --bind /tmp/.hosts /etc/hosts
# Nobody here answers questions about names. torch asks for that of each address that it connects to, and would wait.
: >/tmp/.resolv
[ ! -e /etc/resolv.conf ] || mount --bind /tmp/.resolv /etc/resolv.conf
while :; do
    sleep infinity &
    [ -z "$pid" ] || echo "$pid"
    pid=
    wait $!
done
"""


class Machine:
    """One machine: a network, hostname, process tree, ``/tmp`` and ``/dev/shm`` of its own."""

    def __init__(self, number: int, init: subprocess.Popen[str], hostname: str) -> None:
        """``init`` is the process that has started the machine's first one, and prints its id."""
        self.number, self.hostname = number, hostname
        self.address = f"{NETWORK}.{10 + number}"
        self._init, self._port = init, f"port{number}"
        assert init.stdout is not None
        self._pid = int(init.stdout.readline() or _explain(init))
        link = f"link add {self._port} type veth peer name eth0 netns {self._pid}"
        _ip(link, f"link set {self._port} master switch up")
        _ip(
            "link set lo up",
            f"addr add {self.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {DRIVER_ADDRESS}",
            where=["nsenter", "-t", str(self._pid), "-n"],
        )
        self._own = set(self._processes())

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, output: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start ``command`` on the machine, with ``env`` besides the present environment.

        ``output`` is a file for its output, by default a pipe. Killing the returned process kills the command.
        """
        enter = ["nsenter", "-t", str(self._pid), "-m", "-u", "-i", "-n", "-p", f"--wd={Path.cwd()}"]
        full = tied([*enter, *tied(command)])
        environ = {**os.environ, **(env or {})}
        if output is None:
            pipe = subprocess.PIPE
            return subprocess.Popen(full, env=environ, text=True, stdout=pipe, stderr=subprocess.STDOUT)
        with output.open("w") as file:
            return subprocess.Popen(full, env=environ, text=True, stdout=file, stderr=subprocess.STDOUT)

    def output(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
        """Return the output of ``command`` on the machine, which must succeed within a minute."""
        process = self.run(command, env)
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0, printed
        return printed

    def processes(self) -> dict[int, str]:
        """The ids, as seen from the box, and command lines of all that has been started on the machine."""
        return {pid: line for pid, line in self._processes().items() if pid not in self._own}

    def cut(self) -> None:
        """Pull the machine's network cable: packets are lost, and nobody gets an error."""
        _ip(f"link set {self._port} down")

    def kill(self) -> None:
        """A power failure: all processes end, and no peer gets a last packet. Further calls do nothing."""
        if self._init.poll() is None:
            self.cut()
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._init.wait()

    def _processes(self) -> dict[int, str]:
        """Return all processes of the machine, its keepers too."""
        try:
            local = Path(f"/proc/{self._pid}/ns/pid").readlink()
        except FileNotFoundError:
            return {}
        actual = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # gone, or not ours to look at
                if (folder / "ns" / "pid").readlink() == local:
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    actual[int(folder.name)] = b" ".join(words).decode(errors="replace")[:80].strip()
        return actual


@contextmanager
def pretend_machines(count: int, shared: Sequence[Path] = ()) -> Iterator[list[Machine]]:
    """Machines ``node0``, ``node1``, ..., and `DRIVER_ADDRESS` for this process; the test is skipped where it may not.

    ``shared`` are folders that all see under the same path; the repository, Python and all outside of ``/tmp`` are
    anyway. As on Debian, a machine's own hostname means 127.0.1.1 there; the others' mean their addresses.
    """
    if (reason := _refusal()) is not None:
        pytest.skip(f"no pretend machines: {reason}")
    with ExitStack() as stack:
        stack.enter_context(_own_network())
        visible = [*shared, REPOSITORY, Path(sys.prefix), Path(sys.base_prefix)]
        names = [f"node{number}" for number in range(count)]
        starting = [_start(names, number, visible) for number in range(count)]
        for init in starting:
            stack.callback(_end, init)
        machines = []
        for number, init in enumerate(starting):
            machines.append(Machine(number, init, names[number]))
            stack.callback(machines[-1].kill)
        yield machines


def tied(command: Sequence[str]) -> list[str]:
    """``command``, which is killed when the thread that starts it ends."""
    return ["setpriv", "--pdeathsig=KILL", *command]


def within(condition: Callable[[], bool], limit_s: float = SOON_S) -> bool:
    """True as soon as ``condition`` is, false after ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _start(names: Sequence[str], number: int, visible: Sequence[Path]) -> subprocess.Popen[str]:
    """Start the first process of a machine; it prints its id when the machine is there."""
    addresses = [
        f"{NETWORK}.{10 + second}" if second != number else "127.0.1.1" for second in range(len(names))
    ]
    lines = [f"{address} {name}" for address, name in zip(addresses, names, strict=True)]
    hosts = "\n".join(["127.0.0.1 localhost", *lines, ""])
    script = ["bash", "-c", INIT, "init", names[number], hosts, *map(str, visible)]
    pipe = subprocess.PIPE
    return subprocess.Popen(tied([*UNSHARE, *script]), stdout=pipe, stderr=pipe, text=True)


def _explain(init: subprocess.Popen[str]) -> NoReturn:
    """Raise for a machine that did not come up."""
    _, errors = init.communicate()
    raise RuntimeError(f"a pretend machine did not come up: {errors}")


def _end(init: subprocess.Popen[str]) -> None:
    """End a machine that may not be there yet."""
    init.kill()
    init.wait()
    for stream in (init.stdout, init.stderr):
        assert stream is not None
        stream.close()


@contextmanager
def _own_network() -> Iterator[None]:
    """A network for this thread and its processes, with a switch that the machines are plugged into."""
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    _stop_fork_server()
    try:
        _system_call("unshare", CLONE_NEWNET)
        _ip(
            "link set lo up",
            "link add switch type bridge",
            f"addr add {DRIVER_ADDRESS}/24 dev switch",
            "link set switch up",
        )
        yield
        _ip("link del switch")  # some process may stay in this network
    finally:
        _stop_fork_server()
        _system_call("setns", before, CLONE_NEWNET)
        os.close(before)


def _stop_fork_server() -> None:
    """Have a new fork server for this process's next ranks: they are in the network in which it was started."""
    end_fork_server()
    stop: Callable[[], None] = getattr(forkserver._forkserver, "_stop")  # noqa: B009 - typeshed lacks it
    stop()


def _ip(*commands: str, where: Sequence[str] = ()) -> None:
    """Commands for ``ip``, in this network or ``where`` a prefix goes to."""
    batch = "\n".join(commands)
    subprocess.run([*where, "ip", "-batch", "-"], input=batch, text=True, check=True)


def _system_call(name: str, *args: int) -> None:
    call: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
    if call(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@functools.cache
def _refusal() -> str | None:
    """Why this box cannot make machines; None where it can."""
    if sys.platform != "linux":
        return f"namespaces are Linux's, and this is {sys.platform}"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (packages util-linux, iproute2 and hostname)"
    if os.geteuid() != 0:
        return "namespaces need root"
    try_out = "mount -t tmpfs tmpfs /mnt && ip link add switch type bridge && ip link add type veth"
    tried = subprocess.run([*UNSHARE, "bash", "-c", try_out], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"not permitted here: {tried.stderr.strip()}"
