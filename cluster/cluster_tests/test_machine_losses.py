"""Machines that die or are cut off, and drivers that die: seen in time, and nothing goes on without them."""

from __future__ import annotations

import io
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import cluster_functions as functions
import group_support as support
import pytest
import training_support as runs
from pretend_machines import Machine, within
from ray_cluster import Cluster
from rich.console import Console

from core_rl.errors import ClusterError, RankDied
from core_rl.launch.group import EngineGroup
from core_rl_cluster import RayHosts
from core_rl_trainer import train
from core_rl_trainer.callbacks import Event, StepEnd

MARK = "CORE_RL_TEST_DRIVER"
SCRIPT = Path(__file__).with_name("cluster_driver.py")


def group_on(hosts: RayHosts, machines: Sequence[int]) -> EngineGroup:
    config = support.config(dp=len(machines))
    return support.echo_group(support.SPEC, config, timeout_s=120, hosts=hosts, machines=machines)


def error_of(group: EngineGroup, lose: Callable[[], object]) -> RankDied:
    """The error of a call during which the last rank is lost."""
    assert len(group.run(support.whoami)) == group.world_size
    threading.Timer(0.5, lose).start()
    with pytest.raises(RankDied) as caught:
        group.run(functions.wait, 60.0)
    assert caught.value.rank == group.world_size - 1
    return caught.value


@pytest.mark.parametrize("moment", ["in a call", pytest.param("starting", marks=pytest.mark.nightly)])
def test_nothing_is_left_of_a_killed_driver(cluster: Cluster, moment: str) -> None:
    token = secrets.token_hex(8)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), MARK: token}
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), moment], env=env, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        try:
            assert any(line == f"{moment}\n" for line in driver.stdout)  # Ray prints there too
            assert cluster.left()
        finally:
            driver.send_signal(signal.SIGKILL)
    assert within(lambda: not cluster.left()), cluster.left()
    assert within(lambda: not processes_with(f"{MARK}={token}")), processes_with(f"{MARK}={token}")


def processes_with(variable: str) -> list[str]:
    """Command lines of processes with this variable."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                lines.append((folder / "cmdline").read_bytes().decode(errors="replace"))
    return lines


def test_a_run_goes_on_without_a_killed_machine(cluster: Cluster, start: Path, tmp_path: Path) -> None:
    rollout = {"prompts_per_step": 6, "group_size": 2, "max_new_tokens": 4, "sync": "disk"}
    changes = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 3}}}, "rollout": rollout}
    section = {
        "type": "ray",
        "machines": 3,
        "ranks_per_machine": 1,
        "wait_s": 60.0,
        "lease_s": 10.0,
        "restarts": 1,
    }
    changes["cluster"] = section
    train(runs.recipe_values(start, tmp_path / "one", **changes), console=Console(quiet=True))
    lost: list[Machine] = []

    def power_off(event: Event) -> None:
        if isinstance(event, StepEnd) and event.step == 3 and not lost:
            lost.extend(machine for machine in cluster.machines if cluster.left([machine.number]))
            lost[-1].kill()

    broken = runs.recipe_values(start, tmp_path / "many", **changes)
    console = Console(file=io.StringIO(), width=200)
    train(broken, callbacks=[power_off], console=console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "restart 1 of 1, from the checkpoint of step 2, on 3 machines: " in printed
    assert f"rank 2 on {lost[-1].hostname} (machine 2) was lost with its machine" in printed
    assert runs.curve(tmp_path / "many") == runs.curve(tmp_path / "one")
    assert within(lambda: not cluster.left()), cluster.left()


def test_lost_machines_are_named_and_the_rest_usable(cluster: Cluster) -> None:
    with cluster.hosts(3, lease_s=4.0) as hosts:
        with group_on(hosts, [0, 1, 2]) as group:
            first, second, third = (cluster.named(name) for name in group.run(functions.host_name))
        with group_on(hosts, [0, 1]) as group:
            error = error_of(group, second.cut)
            assert f"rank 1 on {second.hostname} (machine 1) was lost with its machine" in str(error)
        # The ranks behind the cut end by themselves.
        assert within(lambda: not cluster.left([second.number])), cluster.left([second.number])
        with pytest.raises(ClusterError, match=rf"{second.hostname} \(machine 1\) was lost"):
            group_on(hosts, [0, 1])
        with group_on(hosts, [0, 2]) as group:
            error = error_of(group, third.kill)
            assert f"rank 1 on {third.hostname} (machine 2) was lost with its machine" in str(error)
    # Other hosts are made of what is left.
    with cluster.hosts(1) as hosts, group_on(hosts, [0]) as group:
        assert group.run(functions.host_name) == [first.hostname]
    assert within(lambda: not cluster.left([first.number])), cluster.left([first.number])
