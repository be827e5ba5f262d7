"""`EngineGroup`: ranks end with the driver, however it ends, and start from any kind of driver."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import group_support as support
import pytest

HEADER = """
import os, signal, sys, time
from core_rl.launch import process
process.PRELOAD = "core_rl.launch.remote"  # half of what the real one imports: these tests start many servers
if __name__ == "__main__":
    process.start_fork_server()
import group_support as support
from core_rl.launch.group import EngineGroup

def start():
    group = support.echo_group(support.SPEC, support.config(dp=2), timeout_s=120)
    group.initialize()
    print("pids", *group.pids, flush=True)
    return group
"""


class Driver:
    """A Python process that starts a group, prints its process ids and continues with ``body``."""

    def __init__(self, tmp_path: Path, body: str) -> None:
        script = tmp_path / "driver.py"
        main = "\n".join(f"    {line}" for line in body.splitlines())
        script.write_text(f"{HEADER}\nif __name__ == '__main__':\n{main}\n")
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # so that a signal to its group is a terminal's Ctrl-C
        )
        assert self.process.stdout is not None
        self.output = ""
        self.pids: list[int] = []
        for line in self.process.stdout:
            self.output += line
            if line.startswith("pids"):
                self.pids = [int(word) for word in line.split()[1:]]
                return

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def rest(self) -> str:
        """Output of the process until it ends."""
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        self.process.wait(60)
        return self.output


Drive = Callable[[str], Driver]


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    drivers: list[Driver] = []

    def start(body: str) -> Driver:
        drivers.append(Driver(tmp_path, body))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.process.kill()
        driver.process.wait()
        for pid in driver.pids:
            if support.is_alive(pid):
                os.kill(pid, signal.SIGKILL)


MANY_GROUPS = """
import threading
activities = [None, support.hang, support.stop_self, support.hold_interpreter_lock, support.gloo_wait]
groups = [support.echo_group(support.SPEC, support.config(dp=2), timeout_s=120) for _ in activities]
for group, activity in zip(groups, activities):
    group.initialize()
    if activity:
        threading.Thread(target=group.run, args=(activity,), daemon=True).start()
print("pids", *[pid for group in groups for pid in group.pids], flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_ranks_end_with_a_killed_driver(drive: Drive, how: Any) -> None:
    driver = drive(MANY_GROUPS)
    assert len(driver.pids) == 10, driver.output
    time.sleep(1.0)
    assert all(map(support.is_alive, driver.pids))
    driver.process.send_signal(how)
    assert not support.survivors(driver.pids)
    assert driver.process.wait(60) == -how


@pytest.mark.nightly
def test_children_of_ranks_end_with_a_killed_driver(drive: Drive) -> None:
    driver = drive("group = start()\nprint(*group.run(support.start_child), flush=True)\ntime.sleep(300)")
    children = [int(word) for word in driver.line().split()]
    assert len(children) == 2
    assert all(map(support.is_alive, children))
    driver.process.kill()
    assert not support.survivors(driver.pids + children)


@pytest.mark.nightly
def test_forked_driver_child_keeps_no_rank_alive(drive: Drive) -> None:
    body = """
group = start()
if os.fork() == 0:
    print("child", os.getpid(), flush=True)
    time.sleep(300)
    os._exit(0)
time.sleep(300)
"""
    driver = drive(body)
    child = int(driver.line().split()[1])
    driver.process.kill()
    try:
        assert not support.survivors(driver.pids)
        assert support.is_alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("group = start()", 0),
        ("group = start()\nsys.exit(3)", 3),
        ("group = start()\nraise ValueError('of the script')", 1),
        ("import threading\ngroup = start()\nthreading.Thread(target=time.sleep, args=(0.5,)).start()", 0),
        ("pids = start().pids\nos._exit(len(support.survivors(pids)))", 0),  # collected: nothing refers to it
        ("with start() as group:\n    group.run(support.whoami)", 0),
    ],
    ids=["end", "exit", "error", "thread", "collected", "closed"],
)
def test_a_forgotten_group_ends_with_the_script(drive: Drive, body: str, code: int) -> None:
    driver = drive(body)
    output = driver.rest()
    assert driver.process.returncode == code, output
    assert not support.survivors(driver.pids)
    assert ("Traceback" in output) == (code == 1)


def test_ctrl_c_inside_a_call_ends_everything(drive: Drive, tmp_path: Path) -> None:
    # A background job of a shell ignores Ctrl-C, and its children do by default.
    listen = "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    driver = drive(
        f"{listen}with start() as group:\n    group.run(support.arrive_and_wait, {str(tmp_path)!r})"
    )
    support.await_arrival(tmp_path)
    started = time.monotonic()
    os.killpg(driver.process.pid, signal.SIGINT)
    output = driver.rest()
    assert time.monotonic() - started < 30  # the group's timeout is two minutes
    assert driver.process.returncode == -signal.SIGINT
    assert output.count("KeyboardInterrupt") == 1, output  # the driver's alone
    assert not support.survivors(driver.pids)


@pytest.mark.nightly
def test_a_driver_may_handle_ctrl_c_itself(drive: Drive, tmp_path: Path) -> None:
    body = f"""
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"seen\\n"))
with start() as group:
    group.run(support.arrive_and_wait, {str(tmp_path)!r})
    print(group.run(support.whoami))
"""
    driver = drive(body)
    support.await_arrival(tmp_path)
    for _ in range(3):
        os.killpg(driver.process.pid, signal.SIGINT)
        assert driver.line() == "seen\n"
    support.let_go(tmp_path)
    assert driver.rest().endswith("[(0,), (1,)]\n")
    assert driver.process.returncode == 0


@pytest.mark.nightly
def test_ctrl_c_while_the_fork_server_imports(drive: Drive) -> None:
    """The server must live through it, and the driver's next group must work."""
    body = """
from core_rl.launch.process import start_fork_server
signal.signal(signal.SIGINT, lambda *_: None)
start_fork_server()
for _ in range(5):
    time.sleep(0.1)
    os.killpg(0, signal.SIGINT)
with start() as group:
    print(group.run(support.whoami), flush=True)
"""
    output = drive(body).rest()
    assert "[(0,), (1,)]" in output
    assert "KeyboardInterrupt" not in output


@pytest.mark.nightly
def test_the_end_of_the_fork_server_is_noticed(drive: Drive) -> None:
    body = """
group = start()
pids, server = group.pids, int(open(f"/proc/{group.pids[0]}/stat").read().rpartition(")")[2].split()[1])
os.kill(server, signal.SIGKILL)
try:
    group.run(support.hang)
except Exception as error:
    print(type(error).__name__, error.message)
print("left", support.survivors(pids))
group.restart()
group.initialize()
print(group.run(support.whoami))
group.close()
"""
    output = drive(body).rest()
    assert re.search(
        r"RankDied rank \d ended with exit code 255, or the fork server was killed, during hang", output
    )
    assert "left []\n[(0,), (1,)]\n" in output


def run_program(
    arguments: list[str], cwd: Path, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """The outcome of Python with ``arguments``, which finds what these tests import."""
    return subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
    )


@pytest.mark.nightly
def test_a_script_without_a_main_guard_is_told(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(HEADER + "\nwith start() as group:\n    pass\n")
    done = run_program([str(script)], tmp_path)
    assert done.returncode == 1
    assert (
        "ended with exit code 1 during the start. A script that starts a group needs an `if __name__"
        in done.stderr
    )


BODY = """
def own(engine):
    return "own"

def body():
    with start() as group:
        print(group.run(support.whoami))
        try:
            print(group.run(own))
        except Exception as error:
            print(type(error).__name__, error.message)
        print(group.run(support.whoami), flush=True)
"""
GUARDED = f"{HEADER}{BODY}if __name__ == '__main__':\n    body()\n"
NESTED = f"""{HEADER}{BODY}
if __name__ == '__main__':
    import multiprocessing
    child = multiprocessing.get_context('spawn').Process(target=body)
    child.start()
    child.join()
"""
UNKNOWN = "GroupError the function or its arguments cannot be restored in the rank: Can't get attribute 'own'"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "stdin", "answer"),
    [
        (["guarded.py"], None, "['own', 'own']"),
        (["-m", "guarded"], None, "['own', 'own']"),
        (["nested.py"], None, "['own', 'own']"),
        (["-c", f"{HEADER}{BODY}body()"], None, UNKNOWN),
        (["-"], f"{HEADER}{BODY}body()", UNKNOWN),
    ],
    ids=["script", "module", "child process", "-c", "standard input"],
)
def test_every_kind_of_driver(tmp_path: Path, arguments: Any, stdin: str | None, answer: str) -> None:
    (tmp_path / "guarded.py").write_text(GUARDED)
    (tmp_path / "nested.py").write_text(NESTED)
    done = run_program(arguments, tmp_path, stdin)
    assert len(lines := done.stdout.splitlines()) == 4, done.stderr
    assert lines[1] == lines[3] == "[(0,), (1,)]"
    assert lines[2].startswith(answer)
    assert not support.survivors([int(word) for word in lines[0].split()[1:]])


@pytest.mark.nightly  # by day, all groups of these tests are in xdist's workers
def test_inside_an_xdist_worker(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    test = tmp_path / "test_inside.py"
    test.write_text(
        f"{HEADER}\ndef test_it():\n    with start() as group:\n        assert len(group.run(support.whoami)) == 2\n"
    )
    done = run_program(["-m", "pytest", "-q", "-n1", "-p", "no:cacheprovider", str(test)], tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
