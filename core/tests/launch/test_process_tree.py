"""Signals to a process and its children reach no process that has their ids later."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import group_support as support
import pytest

from core_rl.launch import process_tree
from core_rl.launch.process_tree import ProcessTree

LEAVES_A_CHILD = """
import subprocess
print(subprocess.Popen(["/bin/sleep", "300"], stdout=subprocess.DEVNULL).pid, flush=True)
"""


@pytest.fixture(params=["Linux 6.9", "Linux 5.4", "without pidfd"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older kernels, as far as the module sees them."""

    def send(descriptor: int, number: int, info: None, flags: int) -> None:
        if flags:
            raise OSError(errno.EINVAL, "Invalid argument")
        signal.pidfd_send_signal(descriptor, number, info, flags)

    if request.param == "Linux 5.4":
        old = SimpleNamespace(SIGKILL=signal.SIGKILL, pidfd_send_signal=send)
        monkeypatch.setattr(process_tree, "signal", old)
    elif request.param == "without pidfd":
        monkeypatch.delattr("os.pidfd_open", raising=False)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a group."""
    process = subprocess.Popen(["/bin/sleep", "300"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.usefixtures("_kernel")
def test_orphaned_children_are_killed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVES_A_CHILD], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    tree = ProcessTree(process.pid)
    child = int(process.communicate()[0])
    assert support.is_alive(child)
    tree.kill()
    assert not support.survivors([child])
    tree.close()


@pytest.mark.usefixtures("_kernel")
def test_a_running_process_is_killed(bystander: subprocess.Popen[bytes]) -> None:
    tree = ProcessTree(bystander.pid)
    tree.close()
    tree.kill()  # closed: it sends nothing
    assert bystander.poll() is None
    ProcessTree(bystander.pid).kill()
    assert bystander.wait(60) == -signal.SIGKILL


@pytest.mark.usefixtures("_kernel")
def test_later_process_with_same_id_survives(bystander: subprocess.Popen[bytes]) -> None:
    ended = subprocess.Popen(["/bin/true"], start_new_session=True)
    tree = ProcessTree(ended.pid)
    ended.wait()
    # As if the kernel had given it the same id, at another time.
    tree._pid, tree._started = bystander.pid, "0"
    tree.send(signal.SIGUSR1)
    tree.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        bystander.wait(0.2)
