"""The process of one rank: its start, its end with the driver, and the view of the process that it is a child of.

Imports no torch.
"""

from __future__ import annotations

import faulthandler
import fcntl
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from multiprocessing import forkserver, parent_process, resource_tracker, util
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from operator import methodcaller
from typing import Any

from core_rl.distributed.channel import Channel
from core_rl.distributed.sockets import short_socket_names
from core_rl.errors import GroupError
from core_rl.launch.process_tree import ProcessTree

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of its threads, even while it hangs in a collective."""

DRIVER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a program to end. They are the driver's, also where a scheduler sends them to every process."""
PRELOAD, FURTHER = "core_rl.launch.fork_server", "CORE_RL_PRELOAD"
"""A module that the fork server imports, and the environment variable that it reads; it imports torch."""
DUMP_WAIT_S = 1.0
"""Seconds for a rank to write its stacks."""
SERVER_END_S = 10.0
"""Seconds for a killed fork server to free its memory after it has closed its socket."""
LOST = 255
"""The exit code of all processes of `multiprocessing` whose fork server is gone."""


def start_fork_server(modules: Iterable[str] = ()) -> None:
    """Start the process that ranks are forked from, unless it runs already.

    Returns at once, while the server imports torch, transformers and ``modules``. A program that will need ranks
    may call this first and do its own imports meanwhile.
    """
    # Without effect on a server that runs. It replaces the default: to import the main script there.
    multiprocessing.set_forkserver_preload([PRELOAD])
    with signals_for_driver():
        # The tracker first: starting it unblocks some signals again.
        resource_tracker.ensure_running()
    os.environ[FURTHER] = ",".join(modules)
    try:
        with short_socket_names():
            util.get_temp_dir()  # its sockets' and all children's
        with signals_for_driver():
            forkserver.ensure_running()
    finally:
        os.environ.pop(FURTHER, None)  # another thread may have been faster


def end_fork_server() -> None:
    """Kill the fork server, if there is one. It ends with this process by itself, after its imports."""
    if (pid := _fork_server_pid()) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_if_rank_imports_script() -> None:
    """End a rank that imports the driver's script and comes to something that only the driver does.

    The script has no ``if __name__ == "__main__":`` then. The driver reports it when the rank is gone; otherwise the
    rank would first print an error that comes from running the script twice.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as in multiprocessing's own check
        raise SystemExit(1)


@contextmanager
def signals_for_driver() -> Iterator[None]:
    """A process that is started inside never gets the signals that ask a program to end: the driver ends it.

    A scheduler sends them to all processes of a job. The driver saves a checkpoint then, for which it needs the others.
    """
    # A blocked signal stays blocked in a new process, also while that is not ready to ignore it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, DRIVER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_process(target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
    """Run ``target(*args)`` in a new process, forked from the fork server. Raises ``OSError`` or ``EOFError``."""
    # Not a daemon: a daemon may not have children, and an engine may need some.
    process = multiprocessing.get_context("forkserver").Process(
        target=target, args=args, name=name, daemon=False
    )
    start_fork_server()
    server = _fork_server_pid()
    with _real_main_only():
        try:
            process.start()
        except (ConnectionError, EOFError):
            # A killed server closes its socket some time before its end shows, and takes no more orders.
            if server is None or not _ends(server):
                raise
            start_fork_server()
            process.start()
    return process


def _fork_server_pid() -> int | None:
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return pid


def _ends(server: int) -> bool:
    """Whether the fork server ends within `SERVER_END_S`. Its status stays unread: `multiprocessing` looks for it."""
    deadline = time.monotonic() + SERVER_END_S
    while time.monotonic() < deadline:
        try:
            if os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                return True
        except ChildProcessError:  # another thread has read the status
            return True
        time.sleep(0.01)
    return False


def rank_main(
    sock: socket.socket, streams: Mapping[int, int], stacks: int, environ: Mapping[str, str]
) -> None:
    """Answer calls until the driver closes its end of ``sock``.

    ``streams`` maps standard descriptors to the driver's own, ``stacks`` is a file for stack dumps.
    """
    end_with_driver()
    # The output and environment of the fork server are as old as the server.
    for standard, descriptor in streams.items():
        os.dup2(descriptor, standard)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # a rank may be killed with text in its buffer
    os.environ.clear()
    os.environ.update(environ)
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=True)
    # Here, as it imports torch: the process that starts a rank may have none.
    from core_rl.launch.remote import answer_calls

    answer_calls(Channel(sock))


def end_with_driver() -> None:
    """Kill this process and its children when the driver ends, and leave Ctrl-C and SIGTERM to the driver.

    It leads a process group of its own, so that its children end with it and a terminal's
    signals reach the driver alone. Programs that it starts take SIGTERM as usual. A thread waits for
    the driver's end. The kernel does the same, which works even while some C code holds the
    interpreter lock or the rank is stopped.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _leave_to_driver)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DRIVER_SIGNALS)
    driver = parent_process()
    assert driver is not None
    assert driver.pid is not None
    lifeline = driver.sentinel  # the read end of a pipe whose write end only the driver holds
    with suppress(OSError):  # sandboxes may refuse it; the thread remains
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_watch, args=(driver.pid, lifeline), name="driver-watch", daemon=True).start()


def _leave_to_driver(_number: int, _frame: object) -> None:
    """A handler, which programs that this process starts do not inherit, as they would inherit ``SIG_IGN``."""


def _watch(driver_pid: int, lifeline: int) -> None:
    ends = [lifeline]
    # A child that the driver forked (a data loader's worker) holds the write end as well, and would
    # keep the pipe open after the driver's end.
    if hasattr(os, "pidfd_open"):
        with suppress(OSError):  # sandboxes may refuse it; the pipe remains
            ends.append(os.pidfd_open(driver_pid))
    wait(ends)
    os.killpg(0, signal.SIGKILL)


class RankProcess:
    """The process of one rank, a child of this one. Starts at construction; the rank then sends a hello."""

    def __init__(self, rank: int, sock: socket.socket, environ: Mapping[str, str]) -> None:
        """``sock`` leads to the driver, and is closed here. Raises `GroupError` if the process cannot be started."""
        self.rank = rank
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        streams = {number: _Duplicate(number) for number in (1, 2) if _is_open(number)}
        stacks = _Duplicate(self._stacks.fileno())
        arguments = (sock, streams, stacks, dict(environ))
        try:
            self._process = start_process(rank_main, arguments, f"core-rl rank {rank}")
        except (EOFError, OSError) as error:
            raise GroupError(
                f"the fork server ended while it started rank {rank}: {error!r}; try again"
            ) from error
        finally:
            sock.close()
        self._tree = ProcessTree(self.pid)
        self.sentinel = self._process.sentinel
        """Becomes readable when the process has ended."""

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, timeout_s: float) -> None:
        """Return when the process has ended, or after ``timeout_s`` seconds."""
        self._process.join(timeout_s)

    def exit_reason(self) -> str:
        """A phrase about the end of the process."""
        code = self._process.exitcode
        if code is None:
            return "closed its connection"
        if code < 0:
            name = {item.value: item.name for item in signal.Signals}.get(-code, f"signal {-code}")
            hint = " (out of memory is a common reason)" if name == "SIGKILL" else ""
            return f"was killed by {name}{hint}"
        hint = ", or the fork server was killed," if code == LOST else ""
        return f"ended with exit code {code}{hint}"

    def kill(self) -> None:
        """Kill the process and its children. Does not wait; does nothing after `release`."""
        self._tree.kill()

    def release(self) -> None:
        """Free the descriptors of a process that has ended."""
        self._stacks.close()
        self._tree.close()
        with suppress(ValueError):  # the kernel holds it in a system call that cannot be interrupted
            self._process.close()

    def stacks(self, ask: bool = False) -> str:
        """The stacks of the rank's threads at a crash, or with ``ask`` at this moment."""
        size = os.fstat(self._stacks.fileno()).st_size
        if ask:
            self._tree.send(DUMP_SIGNAL)
            deadline = time.monotonic() + DUMP_WAIT_S
            # The signal's handler writes thread by thread: wait until the file is there and rests.
            while time.monotonic() < deadline:
                time.sleep(0.1)
                previous, size = size, os.fstat(self._stacks.fileno()).st_size
                if size and size == previous:
                    break
        return os.pread(self._stacks.fileno(), size, 0).decode(errors="replace")


class _Duplicate:
    """A descriptor of the driver: pickled for a new process, it arrives there as the number of a copy."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[object, ...]:
        return methodcaller("detach"), (DupFd(self._descriptor),)


@contextmanager
def _real_main_only() -> Iterator[None]:
    """Hide the ``__file__`` of a script that Python reads from standard input.

    `multiprocessing` would have the new process run that file, ``<stdin>``. Without a file it runs
    nothing, as for ``python -c``.
    """
    main = sys.modules["__main__"]
    name = getattr(main, "__file__", None)
    if name != "<stdin>":
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = name


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
