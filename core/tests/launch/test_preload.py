"""The fork server never touches CUDA, which a forked process could not use, and ends with its parent."""

from __future__ import annotations

import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
from group_support import eventually, survivors

WATCHED = """
import torch

def touched(*_, **__):
    raise AssertionError("CUDA was initialised")

torch.cuda._lazy_init = torch._C._cuda_init = touched
import core_rl.launch.fork_server
missing = [name for name in core_rl.launch.fork_server.MODULES if name not in __import__("sys").modules]
assert not missing, missing
assert not torch.cuda.is_initialized()
assert __import__("sys").modules["transformers.conversion_mapping"]._checkpoint_conversion_mapping_cache
"""


def test_preloading_initialises_no_cuda() -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


PARENT = """
import os, sys, time
from multiprocessing import forkserver
from core_rl.launch.process import start_fork_server, start_process
if __name__ == "__main__":
    start_fork_server()
    if sys.argv[1] == "ready":
        start_process(os.getpid, (), "a process").join()
    print(forkserver._forkserver._forkserver_pid, flush=True)
    time.sleep(300)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["importing", pytest.param("ready", marks=pytest.mark.nightly)])
def test_fork_server_ends_with_its_parent(moment: str) -> None:
    assert hasattr(forkserver._forkserver, "_forkserver_pid")
    command = [sys.executable, "-c", PARENT, moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        eventually(lambda: "libtorch" in Path(f"/proc/{pid}/maps").read_text())
        parent.send_signal(signal.SIGKILL)
    assert survivors([pid], within_s=2.0) == []


INHERITED = """
from core_rl.launch.process import start_fork_server, start_process
if __name__ == "__main__":
    start_fork_server(("colorsys", "no_such_module"))
    code = "import os, sys; assert 'colorsys' in sys.modules and 'CORE_RL_PRELOAD' not in os.environ"
    process = start_process(exec, (code,), "a process")
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.nightly
def test_ranks_inherit_modules_of_spec() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys" + INHERITED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


KILLED = """
import os, signal, sys, threading
from core_rl.launch import process
process.PRELOAD = "core_rl.launch.remote"
if __name__ == "__main__":
    process.start_process(os.getpid, (), "first").join()
    server = process.forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)  # so that the next order reaches it and is lost
    threading.Timer(0.2, os.kill, (server, signal.SIGKILL)).start()
    second = process.start_process(os.getpid, (), "second")
    second.join()
    sys.exit(second.exitcode)
"""


@pytest.mark.nightly
def test_order_lost_by_a_killed_server_is_repeated() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
