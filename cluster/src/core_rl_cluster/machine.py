"""`MachineActor`: the Ray actor of one machine, whose children are the ranks there."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import platform
import queue
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from core_rl.distributed.authentication import WrongKey, admit
from core_rl.distributed.channel import Buffer, Channel, set_lease
from core_rl.errors import GroupError
from core_rl.launch.kept import KeptMessage, Reference
from core_rl.launch.process import RankProcess, start_fork_server
from core_rl.machine import cpu_cores

CONNECT_S = 60.0
"""Time limit for the driver's connection to a rank that it has asked for."""
HANDSHAKE_S, HANDSHAKE_BYTES = 5.0, 1024
"""Limits of a connection's proof that it knows the key."""
SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors of a connection whose other end has not answered for the lease."""
SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""
IPV4_OFFSET = 20
"""Offset of the address in the kernel's answer."""
LAUNCHERS = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_", "RAY_")
LAUNCHED = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
            "MASTER_PORT")  # fmt: skip
"""Variables of a launcher for its own processes: ranks are another world, and need no token of Ray."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class MachineInfo(NamedTuple):
    """A machine, as its actor reports it."""

    hostname: str
    address: str
    cores: int
    versions: Mapping[str, str]


class End(NamedTuple):
    """The end of a rank, with its stacks at a crash."""

    reason: str
    stacks: str = ""


def driver_code() -> dict[str, Any]:
    """The places of code of this process, as `multiprocessing` gives them to its own: for `adopt`."""
    return spawn.get_preparation_data("driver") | {"authkey": b""}


def adopt(code: Mapping[str, Any]) -> None:
    """Find code where the driver finds it, as far as this machine has it: for processes that are started next.

    So functions of the driver's script can be called where the script has the same path.
    """
    if Path(code["dir"]).is_dir():
        os.chdir(code["dir"])
    # Ray puts copies of packages first, which ranks must not take for the environment's.
    of_ray = tuple(f"{path}{os.sep}" for path in getattr(sys.modules.get("ray"), "__path__", ()))
    sys.path.sort(key=lambda entry: entry.startswith(of_ray))
    sys.path += [entry for entry in code["sys_path"] if entry not in sys.path and Path(entry).exists()]
    # `multiprocessing` runs the main script in each new process, under another name.
    main = ModuleType("__main__")
    name, file = code.get("init_main_from_name"), code.get("init_main_from_path")
    if name is not None and importlib.util.find_spec(name.partition(".")[0]) is not None:
        main.__spec__ = ModuleSpec(name, None)
    elif file is not None and Path(file).is_file():
        main.__file__ = file
    sys.modules["__main__"] = main


def versions() -> dict[str, str]:
    """Versions that the driver and all machines have to share."""
    packages = {name: importlib.metadata.version(name) for name in ("core-rl", "torch")}
    return {"Python": ".".join(platform.python_version_tuple()[:2]), **packages}


class MachineActor:
    """Starts ranks on its machine, reports their ends, and takes them along when it ends. Calls come in threads.

    A rank's connection to the driver is its own. When the driver has been silent on one for the lease, this machine is
    cut off from it: the process ends, and so do the ranks.
    """

    def __init__(self, address: str, code: Mapping[str, Any], key: bytes, lease_s: float) -> None:
        """``address`` is that of this machine towards others, ``key`` what connections have to know."""
        self._address, self._key, self._lease_s = address, key, lease_s
        self._listeners: dict[int, socket.socket] = {}
        self._ranks: dict[int, RankProcess] = {}
        self._messages: dict[int, KeptMessage] = {}
        self._ends: queue.SimpleQueue[tuple[int, End]] = queue.SimpleQueue()
        adopt(code)
        start_fork_server()  # it imports torch while the driver waits for the other machines

    def info(self) -> MachineInfo:
        """Name, address, cores and versions of this machine."""
        return MachineInfo(socket.gethostname(), self._address, cpu_cores(), versions())

    # ------------------------------------------------------------------ ranks

    def listen(self, rank_ids: Sequence[int]) -> list[int]:
        """Ports for the driver's connections to new ranks; ``rank_ids`` number them in all groups."""
        for rank_id in rank_ids:
            self._listeners[rank_id] = socket.create_server((self._address, 0))
        return [self._listeners[rank_id].getsockname()[1] for rank_id in rank_ids]

    def start(self, ranks: Mapping[int, int], environ: Mapping[str, str]) -> list[int]:
        """Start ranks, whose connections are on their way: numbers by id. Returns process ids; raises `GroupError`.

        ``environ`` has variables besides this machine's.
        """
        full = environment_of_ranks(environ, self._address)
        return [self._start(rank_id, rank, full) for rank_id, rank in ranks.items()]

    def _start(self, rank_id: int, rank: int, environ: Mapping[str, str]) -> int:
        with self._listeners.pop(rank_id) as listener:
            sock = accept(listener, self._key, time.monotonic() + CONNECT_S)
        set_lease(sock, self._lease_s)
        watched = sock.dup()
        process = self._ranks[rank_id] = RankProcess(rank, sock, environ)
        threading.Thread(target=self._watch, args=(rank_id, process, watched), daemon=True).start()
        return process.pid

    def _watch(self, rank_id: int, process: RankProcess, watched: socket.socket) -> None:
        """Report the end of a rank; end this process when the driver is out of the reach of its connection."""
        with watched:
            poll = select.poll()
            poll.register(process.sentinel, select.POLLIN)
            poll.register(watched, select.POLLRDHUP)
            while process.sentinel not in dict(poll.poll()):
                if watched.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in SILENCE:
                    os._exit(1)
                poll.unregister(watched)  # the driver has closed it
        process.wait(1.0)
        process.kill()  # its children
        self._ranks.pop(rank_id)
        self._ends.put((rank_id, End(process.exit_reason(), process.stacks())))
        process.release()

    def ends(self) -> dict[int, End]:
        """Wait for the end of a rank; returns all that were not reported yet."""
        reports = [self._ends.get()]
        with suppress(queue.Empty):
            while True:
                reports.append(self._ends.get_nowait())
        return dict(reports)

    def stacks(self, rank_id: int) -> str:
        """The stacks of a rank's threads at this moment."""
        process = self._ranks.get(rank_id)
        return "" if process is None else process.stacks(ask=True)

    def kill(self, rank_id: int) -> None:
        """Kill a rank and its children."""
        if (process := self._ranks.get(rank_id)) is not None:
            process.kill()

    # --------------------------------------------------------------- messages

    def keep(self, number: int, parts: Sequence[Buffer]) -> Reference:
        """Keep a message for the ranks here until `drop`; raises ``OSError`` where there is no memory for it."""
        message = self._messages[number] = KeptMessage.of(parts)
        return message.reference

    def drop(self, number: int) -> None:
        """All ranks have the message."""
        self._messages.pop(number).close()


def accept(listener: socket.socket, key: bytes, deadline: float) -> socket.socket:
    """The first connection that knows ``key``; raises `GroupError` where none comes before ``deadline``."""
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        with suppress(OSError, EOFError, WrongKey):  # a stranger, or none in time
            sock, _ = listener.accept()
            try:
                admit(Channel(sock, HANDSHAKE_BYTES), key, min(deadline, time.monotonic() + HANDSHAKE_S))
            except BaseException:
                sock.close()
                raise
            return sock
    raise GroupError(
        f"the driver did not connect to {listener.getsockname()[0]} in time; does a firewall block connections between "
        "machines?"
    )


def environment_of_ranks(shared: Mapping[str, str], address: str) -> dict[str, str]:
    """The environment of ranks on this machine, which has ``address`` towards others."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHED and not name.startswith(LAUNCHERS)
    }
    # Without it gloo takes the address of the host name, which may be 127.0.1.1.
    interface = interface_of(address)
    interfaces = {} if interface is None else dict.fromkeys(INTERFACES, interface)
    return {**interfaces, **inherited, **shared}


def interface_of(address: str) -> str | None:
    """The network interface that has the IPv4 ``address``; None where there is none."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(query.fileno(), SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[IPV4_OFFSET : IPV4_OFFSET + 4]) == address:
                    return name
    return None
