"""The agent of one machine: starts ranks there for a driver elsewhere, and ends them when the driver is gone.

One connection to the driver carries orders and reports; each rank gets a connection of its own, over which calls and
results travel without passing through the agent.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from core_rl.distributed.authentication import present_key
from core_rl.distributed.channel import Channel
from core_rl.errors import ClusterError, GroupError
from core_rl.launch.hosts import end_ranks
from core_rl.launch.kept import KeptMessage
from core_rl.launch.process import RankProcess, start_fork_server
from core_rl_cluster import hello
from core_rl_cluster.environment import adopt, environment_of_ranks
from core_rl_cluster.hello import MachineInfo
from core_rl_cluster.link import SCHEDULER_SIGNALS
from core_rl_cluster.network import (
    CONTROL_LIMIT_BYTES,
    ControlChannel,
    connect,
    parse_endpoint,
    socket_address,
)

__all__ = ["Agent", "run_agent"]

HANDSHAKE_S = 20.0
RETRY_S = 0.5
"""Between attempts to reach a driver that is not there yet."""
FIRST_LEASE_S = 60.0
"""The lease of a connection until the driver has sent its own."""


@dataclass(frozen=True, kw_only=True)
class _Driver:
    """Address and key of the driver, and the lease of connections to it."""

    host: str
    port: int
    key: bytes
    lease_s: float = FIRST_LEASE_S

    def connect(self, greeting: Mapping[str, Any], deadline: float) -> tuple[Channel, dict[str, Any]]:
        """A connection that the driver has taken, and its answer; raises ``OSError`` and `ClusterError`."""
        limit_s = max(0.1, min(HANDSHAKE_S, deadline - time.monotonic()))
        sock = connect(self.host, self.port, limit_s, self.lease_s)
        channel = Channel(sock, CONTROL_LIMIT_BYTES)
        try:
            end = time.monotonic() + HANDSHAKE_S
            present_key(channel, self.key, end)
            hello.write(channel, {**greeting, "address": socket_address(sock)}, end)
            answer = hello.read(channel, end)
            if refusal := answer.get("refused"):
                raise ClusterError(f"the driver refused this machine: {refusal}")
        except EOFError as error:
            channel.close()
            raise ConnectionResetError("the driver closed the connection") from error
        except BaseException:
            channel.close()
            raise
        return channel, answer


def run_agent(driver: str, key: bytes, machine: int | None, wait_s: float) -> None:
    """Serve the driver at ``driver`` (``HOST:PORT``) until it is gone.

    ``machine`` is the number of this machine; None leaves it to the driver. Raises `ClusterError` if the driver cannot
    be reached within ``wait_s`` seconds, or refuses this machine.
    """
    host, port = parse_endpoint(driver)
    channel, answer = _found(_Driver(host=host, port=port, key=key), machine, wait_s)
    leased = _Driver(host=host, port=port, key=key, lease_s=answer["lease_s"])
    control = ControlChannel(channel.detach(), leased.lease_s)
    with _signals_reported(control):
        adopt(answer["surroundings"])
        start_fork_server()
        Agent(leased, control, answer["machine"], answer["address"]).serve()


@contextmanager
def _signals_reported(control: ControlChannel) -> Iterator[None]:
    """Report signals by which schedulers ask a program to end: the driver saves a checkpoint, and needs the ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def report(number: int, _frame: object) -> None:
        control.send({"is": "signal", "number": number})

    before = {number: signal.signal(number, report) for number in SCHEDULER_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _found(driver: _Driver, machine: int | None, wait_s: float) -> tuple[Channel, dict[str, Any]]:
    """As `_Driver.connect`, to a driver that comes within ``wait_s`` seconds."""
    greeting = {"role": "machine", **MachineInfo.here(machine, address="").message()}
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return driver.connect(greeting, deadline)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"no driver at {driver.host}, port {driver.port} within {wait_s:g} s: {error}; is it running, and "
                    "does its port let this machine in?"
                ) from error
            time.sleep(RETRY_S)


class Agent:
    """The ranks of this machine, under the orders of one driver."""

    def __init__(self, driver: _Driver, control: ControlChannel, machine: int, address: str) -> None:
        self._driver, self._control, self._machine, self._address = driver, control, machine, address
        self._ranks: dict[int, RankProcess] = {}
        self._starts: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._ended = False
        self._killed: set[int] = set()
        """Ids of ranks that were killed before their start."""
        self._changed_out, self._changed_in = os.pipe()
        """Wakes the thread that waits for ends, when there is one more to wait for."""

    def serve(self) -> None:
        """Follow orders until the driver closes the connection, or is silent for its lease; then kill the ranks."""
        for work in (self._start_ranks, self._report_ends):
            threading.Thread(target=work, name=f"core-rl agent {work.__name__}", daemon=True).start()
        try:
            while True:
                self._follow(self._control.receive())
        except (EOFError, OSError, ClusterError):
            pass  # the driver is gone, or out of reach
        finally:
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._control.close()
        self._starts.put(None)
        end_ranks(list(self._ranks.values()))
        os.write(self._changed_in, b"+")

    # ---------------------------------------------------------------- orders

    def _follow(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "start":
                self._starts.put(order)
            case "kill":
                self._kill(order["id"])
            case "stacks":
                threading.Thread(target=self._show_stacks, args=(order,), daemon=True).start()
            case "keep":
                threading.Thread(target=self._keep, args=(order,), daemon=True).start()
            case "release":
                self._release(order["id"])

    def _kill(self, rank_id: int) -> None:
        if (rank := self._ranks.get(rank_id)) is not None:
            rank.kill()
        else:
            self._killed.add(rank_id)

    def _release(self, rank_id: int) -> None:
        self._killed.discard(rank_id)
        rank = self._ranks.pop(rank_id, None)
        if rank is not None:
            rank.release()

    def _show_stacks(self, order: Mapping[str, Any]) -> None:
        rank = self._ranks.get(order["id"])
        text = "" if rank is None else rank.stacks(ask=order["ask"])
        self._control.send({"is": "stacks", "request": order["request"], "text": text})

    def _keep(self, order: Mapping[str, Any]) -> None:
        """Take a message, and keep it for the ranks here until the driver closes its connection."""
        greeting = {"role": "message", "id": order["id"], "machine": self._machine}
        try:
            channel, _ = self._driver.connect(greeting, time.monotonic() + HANDSHAKE_S)
        except (OSError, ClusterError):
            return  # the driver waits no longer
        with suppress(OSError, EOFError), closing(channel), closing(KeptMessage(order["sizes"])) as message:
            for buffer in message.buffers:
                channel.receive_into(buffer, None)
            hello.write(channel, {"path": message.reference.path}, time.monotonic() + HANDSHAKE_S)
            channel.receive()

    # ---------------------------------------------------------- other threads

    def _start_ranks(self) -> None:
        while (order := self._starts.get()) is not None:
            try:
                self._start(order)
            except (GroupError, OSError) as error:
                self._control.send(
                    {"is": "ended", "id": order["id"], "reason": f"could not be started: {error}"}
                )

    def _start(self, order: Mapping[str, Any]) -> None:
        if order["id"] in self._killed:
            raise GroupError("it was ended before")
        greeting = {"role": "rank", "id": order["id"], "machine": self._machine}
        channel, _ = self._driver.connect(greeting, time.monotonic() + HANDSHAKE_S)
        environ = environment_of_ranks(order["environ"], self._address)
        rank = RankProcess(order["rank"], channel.detach(), environ)
        self._ranks[order["id"]] = rank
        self._control.send({"is": "started", "id": order["id"], "pid": rank.pid})
        if self._ended or order["id"] in self._killed:
            rank.kill()
        os.write(self._changed_in, b"+")

    def _report_ends(self) -> None:
        reported: set[int] = set()
        while not self._ended:
            waiting = {rank.sentinel: key for key, rank in self._ranks.copy().items() if key not in reported}
            for end in wait([*waiting, self._changed_out]):
                if end == self._changed_out:
                    os.read(self._changed_out, 1)
                    continue
                rank_id = waiting[int(str(end))]
                reported.add(rank_id)
                self._report_end(rank_id)

    def _report_end(self, rank_id: int) -> None:
        if (rank := self._ranks.get(rank_id)) is None:
            return
        rank.wait(1.0)
        report = {"is": "ended", "id": rank_id, "reason": rank.exit_reason(), "stacks": rank.stacks()}
        self._control.send(report)
