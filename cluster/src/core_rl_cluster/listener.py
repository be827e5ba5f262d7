"""`AgentListener`: where agents and ranks of other machines connect to the driver."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from core_rl.distributed.authentication import WrongKey, admit
from core_rl.distributed.channel import LIMIT_BYTES, Channel, set_lease
from core_rl.errors import ClusterError, ConfigError
from core_rl_cluster import hello
from core_rl_cluster.environment import of_driver
from core_rl_cluster.hello import MachineInfo, Versions
from core_rl_cluster.link import AgentLink
from core_rl_cluster.network import CONTROL_LIMIT_BYTES, ControlChannel

__all__ = ["AgentListener"]

HANDSHAKE_S = 20.0
"""The longest handshake of one connection."""
ONE_SIGNAL_S = 10.0
"""Signals of one number that come from several agents within this time are one."""
BACKLOG = 1024
"""Connections of ranks that may come at once."""
MOST_STRANGERS = 256
"""Connections that may be in their handshake at one time."""


class AgentListener:
    """Listens on ``address``, and takes the agents of ``machines`` machines and the ranks that they start.

    Nothing of a connection is looked at before it has shown that it knows ``key``.
    """

    def __init__(self, address: str, port: int, key: bytes, machines: int, lease_s: float) -> None:
        """Raises `ConfigError` for an address or port that cannot be had."""
        self.links: dict[int, AgentLink] = {}
        """The agents by the numbers of their machines."""
        self.address = address
        self._key, self._machines, self._lease_s = key, machines, lease_s
        self._coming: set[int] = set()
        """Numbers of machines in their handshake."""
        self._refused: list[str] = []
        self._signals: dict[int, float] = {}
        """When signals of agents were passed on."""
        self._changed = threading.Condition()
        self._handshakes = threading.BoundedSemaphore(MOST_STRANGERS)
        self._surroundings = of_driver()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"the driver cannot listen on {address}, port {port}: {error}; choose another address of this machine, "
                "or another port (0 for a free one)"
            ) from error
        shown = f"[{address}]" if ":" in address else address
        self.endpoint = f"{shown}:{self._listener.getsockname()[1]}"
        """``HOST:PORT`` for agents."""
        threading.Thread(target=self._accept, name="core-rl listener", daemon=True).start()

    def is_complete(self, timeout_s: float) -> bool:
        """Whether all machines are there, after ``timeout_s`` seconds at most.

        Raises `ClusterError` once all have come and some were refused.
        """
        with self._changed:
            self._changed.wait_for(self._all_came, timeout_s)
            if self._refused and self._all_came():
                raise ClusterError(f"not all machines can be used{self.account()}")
            return len(self.links) == self._machines

    def expect(self, machines: int) -> None:
        """Wait for no more than ``machines`` machines."""
        with self._changed:
            self._machines = machines
            self._changed.notify_all()

    def account(self) -> str:
        """Return a phrase about the machines that came or were refused."""
        present = ", ".join(str(link.info) for _, link in sorted(self.links.items()))
        parts = [f"there: {present or 'none'}", *self._refused]
        return "; " + "; ".join(parts)

    def close(self) -> None:
        """Take no further connections, and let the agents go. Further calls do nothing."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in list(self.links.values()):
            link.close()

    def let_go(self) -> None:
        """Let the agents go that are there, and wait for all machines again."""
        with self._changed:
            gone = list(self.links.values())
            self.links.clear()
            self._refused.clear()
        for link in gone:
            link.close()

    # ------------------------------------------------------------ connections

    def _all_came(self) -> bool:
        return len(self.links) + len(self._refused) >= self._machines

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                return  # closed
            self._handshakes.acquire()
            threading.Thread(target=self._receive, args=(sock, peer[0]), daemon=True).start()

    def _receive(self, sock: socket.socket, peer: str) -> None:
        try:
            set_lease(sock, self._lease_s)
            self._greet(Channel(sock, CONTROL_LIMIT_BYTES), time.monotonic() + HANDSHAKE_S)
        except (ClusterError, OSError, EOFError, KeyError) as error:
            sock.close()
            if isinstance(error, WrongKey):
                self._note(f"{peer}: {error}")
        finally:
            self._handshakes.release()

    def _greet(self, channel: Channel, deadline: float) -> None:
        """The handshake; raises `ClusterError`, ``OSError``, ``EOFError`` or ``KeyError`` for a wrong one."""
        admit(channel, self._key, deadline)
        greeting = hello.read(channel, deadline)
        if greeting["role"] != "machine":
            self._connect(channel, greeting, deadline)
            return
        del greeting["role"]
        info = MachineInfo.of(greeting)
        with self._changed:
            number, refusal = self._number(info)
        if number is None:
            hello.write(channel, {"refused": refusal}, deadline)
            self._note(f"{info.hostname} ({info.address}) was refused: {refusal}")
            channel.close()
            return
        try:
            self._take_machine(channel, replace(info, number=number), deadline)
        finally:
            self._coming.discard(number)

    def _take_machine(self, channel: Channel, info: MachineInfo, deadline: float) -> None:
        welcome = {
            "machine": info.number,
            "address": info.address,
            "lease_s": self._lease_s,
            "surroundings": self._surroundings,
        }
        hello.write(channel, welcome, deadline)
        assert info.number is not None
        control = ControlChannel(channel.detach(), self._lease_s)
        link = AgentLink(info, control, self._lease_s, self._pass_on)
        with self._changed:
            self.links[info.number] = link
            self._changed.notify_all()

    def _pass_on(self, number: int) -> None:
        """Give this program a signal that the agents got, once for all of them."""
        with self._changed:
            now, before = time.monotonic(), self._signals.get(number)
            if before is not None and now - before < ONE_SIGNAL_S:
                return
            self._signals[number] = now
        os.kill(os.getpid(), number)

    def _connect(self, channel: Channel, greeting: dict[str, Any], deadline: float) -> None:
        hand_over = self.links[greeting["machine"]].receiver(greeting)
        hello.write(channel, {}, deadline)
        channel.limit_bytes = LIMIT_BYTES
        hand_over(channel)

    def _number(self, info: MachineInfo) -> tuple[int | None, str]:
        """The number that the machine gets, which is taken from now on; or None, and why it cannot be used."""
        taken = {number for number, link in self.links.items() if link.lost is None} | self._coming
        free = sorted(set(range(self._machines)) - taken)
        number, reason = info.number, ""
        if differences := Versions.here().differences(info.versions):
            reason = f"it has {', '.join(differences)}; install the same versions on all machines"
        elif not free:
            reason = f"all {self._machines} machines are there"
        elif number is None:
            number = free[0]
        elif number in taken:
            reason = f"there is a machine {number} already"
        elif number not in free:
            reason = f"it calls itself machine {number}, and there are {self._machines}, from 0 on"
        if reason:
            return None, reason
        assert number is not None
        self._coming.add(number)
        return number, ""

    def _note(self, refused: str) -> None:
        with self._changed:
            self._refused.append(refused)
            self._changed.notify_all()
