"""The process of one rank: it takes over the driver's environment and ends with the driver. Imports no torch."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from io import TextIOWrapper
from multiprocessing import parent_process
from multiprocessing.connection import wait

from core_rl.distributed.channel import Channel

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of its threads, even while it hangs in a collective."""

DRIVER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a program to end. They are the driver's, also where a scheduler sends them to every process."""


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
    the driver's end. On Linux the kernel does the same, which works even while some C code holds the
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
    if hasattr(fcntl, "F_SETSIG"):
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
