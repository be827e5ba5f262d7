"""`RayMachine` and `RayRank`: a machine of a Ray cluster and a rank there, as the driver sees them."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from core_rl.distributed.authentication import WrongKey, present_key
from core_rl.distributed.channel import Buffer, Channel, set_lease
from core_rl.errors import GroupError
from core_rl.launch.hosts import SharedMessage
from core_rl_cluster.machine import CONNECT_S, End, MachineInfo

CALL_S = 30.0
"""Time limit of a call that only asks or frees something."""
ANSWER_S = 2.0
"""Time for a machine to show that it is there."""
START_S = 120.0
"""Time limit for processes of ranks: the fork server may still import torch."""


class RayRank:
    """A rank on a machine of the cluster, and the connection to it."""

    def __init__(self, rank: int, rank_id: int, machine: RayMachine, channel: Channel) -> None:
        self.rank, self.channel = rank, channel
        self.pid = 0
        """The process id, when it has started."""
        self._id, self._machine = rank_id, machine
        self._end: End | None = None
        self._ended = threading.Event()
        self._end_out, self._end_in = os.pipe()
        self._ending = threading.Lock()

    @property
    def machine(self) -> int:
        return self._machine.number

    @property
    def place(self) -> str:
        return f" on {self._machine}"

    @property
    def sentinel(self) -> int:
        return self._end_out

    def wait(self, timeout_s: float) -> None:
        self._ended.wait(timeout_s)

    def exit_reason(self) -> str:
        if self._end is None and self._machine.answers():
            return "closed its connection"
        if self._end is None:
            self._machine.lose(
                f"was lost with its machine, from which nothing came for {self._machine.lease_s:g} s"
            )
        assert self._end is not None
        return self._end.reason

    def kill(self) -> None:
        if not self._ended.is_set():
            self._machine.order("kill", self._id)

    def release(self) -> None:
        self.channel.close()
        self._machine.ranks.pop(self._id, None)
        self.end(End("was released"))
        with self._ending:
            if self._end_out >= 0:
                os.close(self._end_out)
                self._end_out = -1

    def stacks(self, ask: bool = False) -> str:
        if self._end is not None:
            return self._end.stacks
        return self._machine.stacks(self._id) if ask else ""

    def keep(self, parts: Sequence[Buffer], deadline: float) -> SharedMessage:
        return self._machine.keep(parts, deadline)

    def end(self, end: End) -> None:
        """The process has ended, or is out of reach; what comes first counts."""
        with self._ending:
            if self._end is None:
                self._end = end
                os.close(self._end_in)
                self._ended.set()


class RayMachine:
    """The actor of one machine (`core_rl_cluster.machine.MachineActor`), and the ranks that it has started."""

    def __init__(self, ray: Any, actor: Any, number: int, info: MachineInfo, lease_s: float) -> None:
        self.number, self.info, self.lease_s = number, info, lease_s
        self.lost: str | None = None
        """Why the machine is out of reach."""
        self.ranks: dict[int, RayRank] = {}
        """Ranks that are not released, by id."""
        self._ray, self._actor = ray, actor
        self._messages = itertools.count()
        self._await_ends()

    def __str__(self) -> str:
        return f"{self.info.hostname} (machine {self.number})"

    def start(
        self, ranks: Sequence[tuple[int, int]], environ: Mapping[str, str], key: bytes
    ) -> list[RayRank]:
        """Start ranks, by id and number, and connect to each. Raises `GroupError`."""
        numbers = dict(ranks)
        try:
            ports = self._ray.get(self._actor.listen.remote(list(numbers)), timeout=CALL_S)
            starting = self._actor.start.remote(numbers, dict(environ))
            for (rank_id, rank), port in zip(ranks, ports, strict=True):
                sock = socket.create_connection((self.info.address, port), timeout=CONNECT_S)
                set_lease(sock, self.lease_s)
                channel = Channel(sock)
                present_key(channel, key, time.monotonic() + CONNECT_S)
                self.ranks[rank_id] = RayRank(rank, rank_id, self, channel)
            started = [self.ranks[rank_id] for rank_id in numbers]
            for place, pid in zip(started, self._ray.get(starting, timeout=START_S), strict=True):
                place.pid = pid
        except (self._ray.exceptions.RayError, OSError, EOFError, WrongKey) as error:
            for rank_id in numbers:
                self.order("kill", rank_id)
            cause = getattr(error, "cause", None)
            if isinstance(cause, GroupError):
                raise cause from error
            raise GroupError(f"{self} did not start its ranks: {first_line(error)}") from error
        return started

    def order(self, method: str, number: int) -> None:
        """Call ``method`` of the actor, without an answer."""
        if self.lost is None and self._ray.is_initialized():
            getattr(self._actor, method).remote(number)

    def answers(self) -> bool:
        """Whether the actor answers at this moment."""
        try:
            self._ray.get(self._actor.info.remote(), timeout=ANSWER_S)
        except self._ray.exceptions.RayError:
            return False
        return True

    def stacks(self, rank_id: int) -> str:
        """The stacks of a rank at this moment, or nothing from a machine that does not answer."""
        try:
            text: str = self._ray.get(self._actor.stacks.remote(rank_id), timeout=CALL_S)
        except self._ray.exceptions.RayError:
            return ""
        return text

    def keep(self, parts: Sequence[Buffer], deadline: float) -> SharedMessage:
        """Send a message to the machine once, through Ray's object store; raises ``OSError``."""
        number = next(self._messages)
        # Arrays lie outside of the pickle: one copy into the store here, and none out of it there.
        message = self._ray.put([np.frombuffer(part, dtype=np.uint8) for part in parts])
        left = max(0.0, deadline - time.monotonic())
        try:
            reference = self._ray.get(self._actor.keep.remote(number, message), timeout=left)
        except self._ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"{self} did not take a message in time") from error
        except self._ray.exceptions.RayError as error:
            raise ConnectionResetError(f"{self} did not keep a message: {first_line(error)}") from error
        return reference, partial(self.order, "drop", number)

    def lose(self, reason: str) -> None:
        """The machine is out of reach, and its ranks with it."""
        self.lost = self.lost or reason
        for rank in list(self.ranks.values()):
            rank.end(End(self.lost))

    def _await_ends(self) -> None:
        """Have Ray report ends of ranks, or of the actor."""
        self._actor.ends.remote().future().add_done_callback(self._take_ends)

    def _take_ends(self, answer: Any) -> None:
        """In a thread of Ray: pass the ends of ranks on, and wait for the next ones."""
        error = answer.exception()
        if error is not None:
            self.lose(f"was lost with its machine: {first_line(error)}")
            return
        for rank_id, end in answer.result().items():
            if (rank := self.ranks.get(rank_id)) is not None:
                rank.end(end)
        self._await_ends()


def first_line(error: BaseException) -> str:
    """The kind of ``error``, and the first line of its message: Ray's messages have many."""
    text = str(getattr(error, "cause", None) or error).strip()
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"
