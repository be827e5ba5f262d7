"""`AgentLink`: the agent of one machine as the driver sees it, and `AgentRank`: a rank there."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core_rl.distributed.channel import Buffer, Channel
from core_rl.errors import ClusterError
from core_rl.launch.hosts import Kept
from core_rl.launch.kept import Reference
from core_rl_cluster import hello
from core_rl_cluster.hello import MachineInfo
from core_rl_cluster.network import ControlChannel

__all__ = ["AgentLink", "AgentRank"]

SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send to all processes of a job before they kill them, as ``--signal=USR1@300`` of Slurm."""
STACKS_S = 5.0
"""Seconds for an agent to send the stacks of a rank."""


class AgentRank:
    """A rank on another machine. Its channel comes when the rank's connection does (`connected`)."""

    channel: Channel

    def __init__(self, rank: int, rank_id: int, link: AgentLink) -> None:
        self.rank = rank
        self.rank_id = rank_id
        self.connected = threading.Event()
        """Also set when the rank has ended before."""
        self._link = link
        self._pid = 0
        self._ended = threading.Event()
        self._reason, self._stacks = "", ""
        self._end_out, self._end_in = os.pipe()
        self._releasing = threading.Lock()

    @property
    def machine(self) -> int:
        assert self._link.info.number is not None
        return self._link.info.number

    @property
    def place(self) -> str:
        return f" on {self._link.info.hostname} (machine {self._link.info.number})"

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def sentinel(self) -> int:
        return self._end_out

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, or is out of reach."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> None:
        self._ended.wait(timeout_s)

    def exit_reason(self) -> str:
        return self._reason or "closed its connection"

    def kill(self) -> None:
        if not self.has_ended:
            self._link.order("kill", self.rank_id)

    def release(self) -> None:
        if (channel := getattr(self, "channel", None)) is not None:
            channel.close()
        self._link.forget(self)
        self.end("was released")
        with self._releasing:
            if self._end_out >= 0:
                os.close(self._end_out)
                self._end_out = -1

    def stacks(self, ask: bool = False) -> str:
        return self._stacks if self.has_ended else self._link.stacks(self.rank_id, ask=ask)

    def keep(self, parts: Sequence[Buffer], deadline: float) -> Kept:
        return self._link.keep(parts, deadline)

    # ----------------------------------------------------------- for the link

    def connect(self, channel: Channel) -> None:
        """The rank's connection is there."""
        self.channel = channel
        self.connected.set()

    def started(self, pid: int) -> None:
        """Note the id of its process."""
        self._pid = pid

    def end(self, reason: str, stacks: str = "") -> None:
        """The process has ended, or is out of reach. What came first counts."""
        with self._releasing:
            if self._ended.is_set():
                return
            self._reason, self._stacks = reason, stacks
            self._ended.set()
            self.connected.set()
            os.close(self._end_in)


@dataclass(frozen=True)
class _KeptThere:
    """A message that an agent keeps as long as its connection is open."""

    reference: Reference
    channel: Channel

    def close(self) -> None:
        self.channel.close()


class AgentLink:
    """The connection to the agent of one machine, with a thread that reads its reports."""

    def __init__(
        self, info: MachineInfo, control: ControlChannel, lease_s: float, on_signal: Callable[[int], None]
    ) -> None:
        """``on_signal`` gets the numbers of a scheduler's signals, where this program handles them."""
        self.info = info
        self.lost: str | None = None
        """Why the machine is out of reach."""
        self._control = control
        self._lease_s = lease_s
        self._on_signal = on_signal
        self._ranks: dict[int, AgentRank] = {}
        self._requests = itertools.count()
        self._messages: dict[int, queue.SimpleQueue[Channel]] = {}
        """Connections of messages, by the numbers of the calls that wait for them."""
        self._answers: dict[int, tuple[threading.Event, list[str]]] = {}
        threading.Thread(target=self._read, name=f"core-rl {info}", daemon=True).start()

    def start(self, rank: int, rank_id: int, environ: Mapping[str, str]) -> AgentRank:
        """Have the agent start a rank; ``rank_id`` stands for it among all ranks of all groups."""
        started = AgentRank(rank, rank_id, self)
        self._ranks[rank_id] = started
        self.order("start", rank_id, rank=rank, environ=dict(environ))
        if self.lost is not None:
            started.end(self.lost)
        return started

    def order(self, action: str, rank_id: int, **details: object) -> None:
        """Send the agent an order; the reading thread notices an agent out of reach."""
        self._control.send({"do": action, "id": rank_id, **details})

    def stacks(self, rank_id: int, *, ask: bool) -> str:
        """The stacks of a rank, or nothing from an agent that does not answer."""
        number, answer = next(self._requests), (threading.Event(), list[str]())
        self._answers[number] = answer
        self.order("stacks", rank_id, request=number, ask=ask)
        answer[0].wait(STACKS_S)
        del self._answers[number]
        return "".join(answer[1])

    def keep(self, parts: Sequence[Buffer], deadline: float) -> Kept:
        """Send a message to the machine, which keeps it for its ranks; raises ``OSError``."""
        number, connection = next(self._requests), queue.SimpleQueue[Channel]()
        self._messages[number] = connection
        self.order("keep", number, sizes=[memoryview(part).nbytes for part in parts])
        try:
            channel = connection.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(f"{self.info} did not take a message in time") from None
        finally:
            del self._messages[number]
        for part in parts:
            channel.send_bytes(part, deadline)
        try:
            path = hello.read(channel, deadline)["path"]
        except (EOFError, ClusterError) as error:
            channel.close()
            raise ConnectionResetError(f"{self.info} did not keep a message: {error}") from error
        return _KeptThere(Reference(path, tuple(memoryview(part).nbytes for part in parts)), channel)

    def receiver(self, greeting: Mapping[str, Any]) -> Callable[[Channel], None]:
        """Return the taker of the connection of a rank or message; raises `ClusterError` if none waits."""
        if greeting["role"] == "rank" and (rank := self._ranks.get(greeting["id"])) is not None:
            return rank.connect
        if greeting["role"] == "message" and (waiting := self._messages.get(greeting["id"])) is not None:
            return waiting.put
        raise ClusterError("a connection that no call waits for")

    def forget(self, rank: AgentRank) -> None:
        """The driver has no use for ``rank`` any more."""
        if self._ranks.pop(rank.rank_id, None) is not None:
            self.order("release", rank.rank_id)

    def close(self) -> None:
        """Let go of the agent, which then ends with its ranks."""
        self._lose("was let go")

    # ---------------------------------------------------------------- threads

    def _read(self) -> None:
        try:
            while True:
                self._handle(self._control.receive())
        except TimeoutError:
            self._lose(f"was lost with its machine, from which nothing came for {self._lease_s:g} s")
        except (EOFError, ConnectionResetError):  # reset where it was killed before it had read all orders
            self._lose("was lost with the agent of its machine, which ended")
        except (OSError, ClusterError, KeyError) as error:
            self._lose(f"was lost with the connection to its machine: {error}")

    def _handle(self, report: Mapping[str, Any]) -> None:
        if report["is"] == "stacks":
            if (answer := self._answers.get(report["request"])) is not None:
                answer[1].append(report["text"])
                answer[0].set()
            return
        if report["is"] == "signal":
            self._handle_signal(report["number"])
            return
        rank = self._ranks.get(report.get("id", -1))
        if rank is None:
            return
        if report["is"] == "started":
            rank.started(report["pid"])
        elif report["is"] == "ended":
            rank.end(report["reason"], report.get("stacks", ""))

    def _handle_signal(self, number: int) -> None:
        """Pass on a signal that this program handles; any other ends the agent, and not this program."""
        if number not in SCHEDULER_SIGNALS:
            return
        if signal.getsignal(number) == signal.SIG_DFL:
            name = signal.Signals(number).name
            self._lose(f"was lost with the agent of its machine, which got {name}")
        else:
            self._on_signal(number)

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._control.close()
        for rank in list(self._ranks.values()):
            rank.end(self.lost)
