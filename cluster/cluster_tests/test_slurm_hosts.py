"""`SlurmHosts` in allocations of real Slurm, and where there is none."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from pretend_machines import DRIVER_ADDRESS, within
from slurm_daemons import Slurm

from core_rl.errors import ClusterError, ConfigError
from core_rl_cluster import agent_hosts
from core_rl_cluster.slurm import SlurmHosts

BATCH = Path(__file__).with_name("cluster_batch.py")


@pytest.fixture(scope="module")
def allocation(slurm: Slurm) -> Iterator[None]:
    with slurm.allocation(3) as variables, mock.patch.dict(os.environ, variables):
        yield


def hosts(machines: int, **settings: Any) -> SlurmHosts:
    return SlurmHosts(machines, address=DRIVER_ADDRESS, wait_s=60, lease_s=10, **settings)


def host_names(made: SlurmHosts) -> list[str]:
    with made:
        return [info.hostname for info in made.found]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["node0", "node1"]),
        ({"exclude": "node0"}, ["node1", "node2"]),
        ({"nodelist": "node[0,2]", "overlap": False}, ["node0", "node2"]),
    ],
)
def test_machines_are_the_first_usable_nodes(
    allocation: None, settings: dict[str, Any], expected: list[str]
) -> None:
    assert host_names(hosts(2, **settings)) == expected


@pytest.mark.parametrize(
    ("count", "settings", "message"),
    [
        (4, {}, r"machines = 4, and job \d+ has 3 nodes \(node\[0-2\]\); allocate more \(--nodes=4\)"),
        (3, {"exclude": "node1"}, r"job \d+ has 3 nodes \(node\[0-2\]\), of which 2 may be used"),
        (1, {"nodelist": "node7"}, r"nodelist = 'node7': node7 not among the nodes of job \d+"),
        (1, {"nodelist": ""}, r"nodelist = '' names no nodes"),
    ],
)
def test_missing_nodes_are_refused_before_the_start(
    allocation: None, count: int, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        hosts(count, **settings)


def test_failed_steps_show_the_output_of_srun(allocation: None) -> None:
    with pytest.raises(ClusterError, match=r"(?s)srun ended with exit code \d+ .*/no/such/python"):
        hosts(2, python="/no/such/python").open()


def test_the_key_is_on_no_command_line(allocation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    key = secrets.token_bytes(32)
    monkeypatch.setattr(agent_hosts, "new_key", lambda: key)
    with hosts(2):
        assert holders("environ", key)  # srun has it
        assert not holders("cmdline", key)


def test_signals_for_the_job_reach_the_driver_once(allocation: None, slurm: Slurm) -> None:
    """Slurm sends it to the steps alone, as for ``--signal=USR1@300``."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        with hosts(2) as made:
            slurm.command("scancel", "--signal=USR1", os.environ["SLURM_JOB_ID"])
            assert within(lambda: bool(seen))
            time.sleep(0.5)
            assert seen == [signal.SIGUSR1]
            assert len(made.found) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def holders(file: str, key: bytes) -> list[Path]:
    """The processes in whose environment or command line the key is."""
    actual = []
    for path in Path("/proc").glob(f"[0-9]*/{file}"):
        with suppress(OSError):
            if key.hex().encode() in path.read_bytes():
                actual.append(path)
    return actual


def test_no_allocation_and_no_srun_are_explained(allocation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="srun and scontrol not found on PATH"):
        hosts(1)
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(ConfigError, match=r"in no Slurm allocation .*salloc --nodes=N"):
        hosts(1)


def test_drivers_in_batch_scripts_have_whole_nodes(slurm: Slurm, tmp_path: Path) -> None:
    """The script's own step and the shape of its tasks count for nothing."""
    printed, result = tmp_path / "printed", tmp_path / "result"
    shape = ["-N2", "--ntasks-per-node=2", "--cpus-per-task=2"]
    export = f"--export=ALL,PYTHONPATH={os.pathsep.join(filter(None, sys.path))}"
    command = f"{sys.executable} {BATCH} {result}"
    slurm.command("sbatch", *shape, export, f"--output={printed}", f"--wrap={command}")
    assert within(lambda: not slurm.command("squeue", "-h", "-n", "wrap"), 120)
    assert result.exists(), printed.read_text()
    actual = json.loads(result.read_text())
    assert actual["driver"] == "node0"
    assert actual["ranks"] == ["node0", "node0", "node1", "node1"]
