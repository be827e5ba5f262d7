"""`RankPool`: calls on rank processes, with time limits and errors that name the rank."""

from __future__ import annotations

import math
import select
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import util
from typing import Any

from core_rl.distributed.channel import Buffer
from core_rl.errors import CoreRLError, GroupError, RankDied, RankTimeout
from core_rl.launch.hosts import EXIT_WAIT_S, Hosts, Rank, Slot, end_ranks
from core_rl.launch.kept import can_keep
from core_rl.launch.messages import Call, Failure, pack_sent, packed, unpack_reply

START_TIMEOUT_S = 300.0
"""The longest start of a rank in seconds, the first import of torch included."""
GRACE_S = 5.0
"""Seconds for the other ranks to answer after a failure: they may wait for the failed rank in a collective.

A rank that still imports a module has not reached the collective: its seconds start again."""
IMPORTING = "<frozen importlib._bootstrap>"
"""Part of a stack inside an import."""
KEPT_BYTES = 2**20
"""Smallest message that is sent once to a machine with several ranks."""
START = "the start"
IF_SLOW = "If the call is only slow, raise the time limit of the group's calls (timeout_s)"


class RankPool:
    """Processes that hold one rank each, and one exchange at a time with them. ``hosts`` start them."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._ranks: list[Rank] = []
        self._busy = threading.Lock()
        self._ended: str | None = None
        self.caller: int | None = None
        """The engine id of the running call."""
        self.starting_s = 0.0
        """Seconds that `grow` has taken."""
        # For a pool that is forgotten. `multiprocessing` joins its processes at exit, after these
        # finalizers: an `atexit` handler might come too late and leave it waiting for ever.
        util.Finalize(self, _kill_all, args=(self._ranks,), exitpriority=100)

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order, each on the machine of its rank."""
        return [rank.pid for rank in self._ranks]

    @property
    def is_idle(self) -> bool:
        """True while the ranks wait for a call."""
        return self._ended is None and not self._busy.locked()

    def check(self) -> None:
        """Raise `GroupError` if the ranks are gone."""
        if self._ended is not None:
            raise GroupError(f"this group has ended: {self._ended}. Start a new one, or call restart()")

    def grow(self, slots: Sequence[Slot]) -> None:
        """Have a rank at each of ``slots``, of which the first are taken by ranks that are there.

        Raises `GroupError`, such as `RankDied` or `RankTimeout`, if one does not come up.
        """
        started = time.monotonic()
        with self._exchange(START):
            first = len(self._ranks)
            if missing := list(enumerate(slots))[first:]:
                self._ranks += self._hosts.start(missing)
            self._collect(self._ranks[first:], START, START_TIMEOUT_S, GRACE_S)
        self.starting_s += time.monotonic() - started

    def call(self, call: Call, per_rank: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        """``call`` on the first ``len(per_rank)`` ranks, with ``per_rank[i]`` before its arguments.

        Returns the results in rank order.

        Raises the error of the first rank that failed. When every rank has answered, the ranks can be
        called again; else they are ended, and every further call raises the reason.
        """
        # Ranks that are given the same tuple share its bytes.
        different = {id(args): args for args in per_rank}
        name, shared = call.name, pack_sent(call.name, call)
        payloads = {key: [*shared, *pack_sent(name, args)] for key, args in different.items()}
        with self._exchange(name, call.engine_id), ExitStack() as messages:
            ranks = self._ranks[: len(per_rank)]
            deadline = time.monotonic() + timeout_s
            receivers: dict[tuple[int, int], list[Rank]] = defaultdict(list)
            for rank, args in zip(ranks, per_rank, strict=True):
                receivers[rank.machine, id(args)].append(rank)
            for (_, key), group in receivers.items():
                self._send(group, payloads[key], name, deadline, messages)
            replies = self._collect(ranks, name, timeout_s, GRACE_S if call.is_collective else timeout_s)
            places = {rank.rank: rank.place for rank in ranks}
        for number, failure in _failures(replies).items():
            raise failure.to_error(number, len(ranks), places[number])
        return [reply for _, reply in sorted(replies.items())]

    def close(self, wait_s: float = EXIT_WAIT_S) -> None:
        """End the ranks, which may take ``wait_s`` seconds to end by themselves."""
        if not self._busy.acquire(blocking=False):
            # Another thread, or the frame that a signal handler interrupted, is in a call: it fails
            # with `RankDied` now, and frees the ranks.
            self._ended = self._ended or "it was closed during a call"
            _kill_all(self._ranks)
            return
        try:
            for rank in self._ranks:
                rank.channel.close()
            deadline = time.monotonic() + wait_s
            for rank in self._ranks:
                rank.wait(max(0.0, deadline - time.monotonic()))
            self._end("it was closed")
        finally:
            self._busy.release()

    def _end(self, reason: str) -> None:
        self._ended = self._ended or reason
        end_ranks(self._ranks)
        self._ranks.clear()

    @contextmanager
    def _exchange(self, name: str, caller: int | None = None) -> Iterator[None]:
        """One at a time; whatever interrupts it, Ctrl-C included, leaves ranks in an unknown state and ends them."""
        if not self._busy.acquire(blocking=False):
            raise GroupError(
                f"{name}: another call on this group is running, or on a colocated group; make one call at "
                "a time"
            )
        self.caller = caller
        try:
            self.check()
            try:
                yield
            except BaseException as error:
                first_line = str(error).partition("\n")[0]
                self._end(f"{name} failed with {type(error).__name__}: {first_line}")
                raise
        finally:
            self.caller = None
            self._busy.release()

    def _send(
        self,
        ranks: Sequence[Rank],
        payload: Sequence[Buffer],
        name: str,
        deadline: float,
        messages: ExitStack,
    ) -> None:
        """Send ``payload`` to ``ranks`` of one machine; ``messages`` frees copies on the machine."""
        size = sum(memoryview(part).nbytes for part in payload)
        rank = ranks[0]
        try:
            if len(ranks) > 1 and size >= KEPT_BYTES and can_keep():
                payload = _kept(rank, payload, deadline, messages)
            for rank in ranks:
                rank.channel.send(payload, deadline)
        except TimeoutError as error:
            raise RankTimeout(
                f"rank {rank.rank}{rank.place} did not take the arguments of {name} in time. {IF_SLOW}",
                rank.rank,
            ) from error
        except OSError:
            raise _death(rank, name, {}) from None

    def _collect(self, ranks: Sequence[Rank], name: str, timeout_s: float, grace_s: float) -> dict[int, Any]:
        """The replies in the order of their arrival; raises unless every rank has answered.

        After a failure the others have ``grace_s`` seconds.
        """
        waiting = {rank.rank: rank for rank in ranks}
        replies: dict[int, Any] = {}
        last = deadline = time.monotonic() + timeout_s
        watch, graced = Watch(ranks), False
        while waiting:
            ready = watch.ready(deadline)
            if not ready and (deadline == last or not any(map(_imports, waiting.values()))):
                break
            if not ready:
                deadline = min(last, time.monotonic() + grace_s)
            for rank, has_answer in ready:
                if not has_answer:
                    raise _death(rank, name, replies)
                try:
                    replies[rank.rank] = unpack_reply(rank.channel.receive(deadline))
                except TimeoutError:
                    break  # it stopped in the middle of a message, and the deadline is over
                except (EOFError, OSError):
                    raise _death(rank, name, replies) from None
                del waiting[rank.rank]
                watch.drop(rank)
            if not graced and _failures(replies):
                graced = True
                deadline = min(last, time.monotonic() + grace_s)
        if waiting:
            raise _silence(list(waiting.values()), ranks, name, (timeout_s, grace_s), replies)
        return replies


def _kept(rank: Rank, payload: Sequence[Buffer], deadline: float, messages: ExitStack) -> Sequence[Buffer]:
    """Reference for each rank of a machine to ``payload``, which is sent there through ``rank``."""
    try:
        reference, free = rank.keep(payload, deadline)
    except TimeoutError:
        raise
    except OSError:
        return payload  # no memory for it; or the machine is lost, which sending it to each rank will show
    messages.callback(free)
    return packed(reference)


def _imports(rank: Rank) -> bool:
    """Whether ``rank`` is inside an import at this moment."""
    before = len(rank.stacks())
    return IMPORTING in rank.stacks(ask=True)[before:]


def _failures(replies: Mapping[int, Any]) -> dict[int, Failure]:
    return {rank: reply for rank, reply in replies.items() if isinstance(reply, Failure)}


def _death(rank: Rank, name: str, replies: Mapping[int, Any]) -> RankDied:
    rank.wait(EXIT_WAIT_S)  # its end of the socket closes a moment before the exit code is known
    message = f"rank {rank.rank}{rank.place} {rank.exit_reason()} during {name}"
    if name == START:
        message += ". A script that starts a group needs an `if __name__ == '__main__':` around its main part"
    error = RankDied(message, rank.rank, rank.stacks())
    for number, failure in _failures(replies).items():
        error.add_note(f"rank {number} failed as well: {failure.summary}")
    return error


def _silence(
    silent: Sequence[Rank],
    ranks: Sequence[Rank],
    name: str,
    limits_s: tuple[float, float],
    replies: Mapping[int, Any],
) -> CoreRLError:
    """The error for ``silent`` ranks: the first failure, or a timeout. ``limits_s`` are without and after a failure."""
    timeout_s, grace_s = limits_s
    numbers = [rank.rank for rank in silent]
    places = {rank.rank: rank.place for rank in ranks}
    for number, failure in _failures(replies).items():
        error = failure.to_error(number, len(ranks), places[number])
        error.add_note(
            f"Ranks {numbers} did not answer within {grace_s:g} s after that, so the group was ended."
        )
        return error
    stacks = "\n".join(f"Rank {rank.rank}{rank.place} was at:\n{rank.stacks(ask=True)}" for rank in silent)
    return RankTimeout(
        f"ranks {numbers} of {len(ranks)} did not answer {name} within {timeout_s:g} s, so the group was ended. "
        f"{IF_SLOW}",
        numbers[0],
        stacks,
    )


def _kill_all(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.kill()


class Watch:
    """Waits for ranks. Each is registered once and not for each wait: many ranks may answer one by one."""

    def __init__(self, ranks: Iterable[Rank]) -> None:
        self._poll = select.poll()
        self._owners: dict[int, Rank] = {}
        for rank in ranks:
            for end in (rank.channel.fileno(), rank.sentinel):
                self._poll.register(end, select.POLLIN)
                self._owners[end] = rank

    def ready(self, deadline: float) -> list[tuple[Rank, bool]]:
        """Ranks that answered (True) or ended without an answer (False); empty at ``deadline``, a `time.monotonic`."""
        left = max(0.0, deadline - time.monotonic())
        events = dict(self._poll.poll(math.ceil(1000 * left)))
        ranks = {self._owners[end].rank: self._owners[end] for end in events}
        return [(rank, rank.channel.fileno() in events) for rank in ranks.values()]

    def drop(self, rank: Rank) -> None:
        """Wait for ``rank`` no longer."""
        for end in (rank.channel.fileno(), rank.sentinel):
            self._poll.unregister(end)
