"""`ProcessTree`: a process and its children, for signals to them alone."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

PIDFD_SIGNAL_PROCESS_GROUP = 1 << 2
"""The flag of ``pidfd_send_signal`` for the whole process group, since Linux 6.9."""


class ProcessTree:
    """A process that leads a process group, and its children in that group.

    The kernel gives an id to another process once this one was waited for and its group is empty. A descriptor of the
    process stands for it alone; where the kernel has none, start times are compared before ids are used.
    """

    def __init__(self, pid: int) -> None:
        """``pid`` is a process that was just started."""
        self._pid = pid
        self._started = _start_time(pid)
        self._descriptor: int | None = None
        self._closed = False
        # Any thread may kill, and so may a signal's handler in the middle of it.
        self._lock = threading.RLock()
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # the process is gone, or a sandbox refuses it
                self._descriptor = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it is still there."""
        with self._lock:
            if self._closed or self._sent(number):
                return
            if _start_time(self._pid) == self._started:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(self._pid, number)

    def kill(self) -> None:
        """Kill the process and its children, orphans included. Does not wait."""
        with self._lock:
            self.send(signal.SIGKILL)
            if self._closed or self._sent(signal.SIGKILL, PIDFD_SIGNAL_PROCESS_GROUP):
                return
            # While the group has members, no other process gets its id.
            if _start_time(self._pid) in (None, self._started):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Free the descriptor; further signals are not sent."""
        with self._lock:
            self._closed = True
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _sent(self, number: signal.Signals, flags: int = 0) -> bool:
        """Send a signal through the descriptor; false where the kernel cannot."""
        if self._descriptor is None:
            return False
        try:
            signal.pidfd_send_signal(self._descriptor, number, None, flags)
        except ProcessLookupError:
            pass
        except OSError:
            return False
        return True


def _start_time(pid: int) -> str | None:
    """The start of the process in clock ticks; None where there is no such process, or no ``/proc``."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
