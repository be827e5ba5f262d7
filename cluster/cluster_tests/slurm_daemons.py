"""Real Slurm on pretend machines: slurmctld and munged where the test runs, a slurmd on each machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pretend_machines import DRIVER_ADDRESS, Machine, tied

DAEMONS = ("munged", "slurmctld", "slurmd", "srun")
START_S = 30.0
"""Seconds for all machines to be idle: half a second on idle cores."""
CONFIG = """
ClusterName=pretend
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=30
KillWait=2
MailProg=/bin/true
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir=/tmp/slurmd
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldPidFile={folder}/slurmctld.pid
"""
NODE = "NodeName={name} NodeAddr={address} CPUs=8 RealMemory=4000 State=UNKNOWN\n"
PARTITION = "PartitionName=pretend Nodes={names} Default=YES MaxTime=INFINITE State=UP\n"
# With nothing mounted; 22.05 knows no way to do without cgroups.
CGROUPS = "CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n"


@dataclass(frozen=True)
class Slurm:
    """A Slurm cluster that runs."""

    environ: Mapping[str, str]
    """Variables that its commands need."""

    def command(self, *words: str) -> str:
        """Return the output of a command of Slurm, which must succeed within a minute."""
        done = subprocess.run(
            words, env={**os.environ, **self.environ}, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def slurm_daemons(machines: Sequence[Machine], folder: Path) -> Iterator[Slurm]:
    """Slurm on ``machines``; ``folder`` must be shared by all. The test is skipped where its packages are missing."""
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install slurm-wlm munge")
    slurm = Slurm({"SLURM_CONF": str(folder / "slurm.conf")})
    _configure(machines, folder)
    with ExitStack() as stack:
        for command in _controllers(folder):
            daemon = _start(command, slurm, folder / f"{command[0]}.log")
            stack.callback(_end, daemon)
        daemons = [
            machine.run(
                ["slurmd", "-D", "-N", machine.hostname], slurm.environ, folder / f"{machine.hostname}.log"
            )
            for machine in machines
        ]
        for daemon in daemons:
            stack.callback(_end, daemon)
        _wait_idle(slurm, len(machines), folder)
        yield slurm


def _configure(machines: Sequence[Machine], folder: Path) -> None:
    """Write all files that the daemons read."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    names = [machine.hostname for machine in machines]
    config = CONFIG.format(controller=socket.gethostname(), address=DRIVER_ADDRESS, folder=folder)
    nodes = [NODE.format(name=machine.hostname, address=machine.address) for machine in machines]
    partition = PARTITION.format(names=",".join(names))
    (folder / "slurm.conf").write_text("".join([config, *nodes, partition]))
    (folder / "cgroup.conf").write_text(CGROUPS)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    (folder / "state").mkdir()


def _controllers(folder: Path) -> list[list[str]]:
    files = [f"--{name}-file={folder / 'munge'}.{name}" for name in ("key", "log", "pid", "seed")]
    munged = ["munged", "--foreground", "--force", f"--socket={folder / 'munge.socket'}", *files]
    return [munged, ["slurmctld", "-D", "-c"]]


def _start(command: Sequence[str], slurm: Slurm, log: Path) -> subprocess.Popen[str]:
    with log.open("a") as file:
        return subprocess.Popen(
            tied(command), env={**os.environ, **slurm.environ}, stdout=file, stderr=file, text=True
        )


def _end(daemon: subprocess.Popen[str]) -> None:
    daemon.kill()
    daemon.wait()


def _wait_idle(slurm: Slurm, count: int, folder: Path) -> None:
    deadline = time.monotonic() + START_S
    command = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
    while True:
        env = {**os.environ, **slurm.environ}
        idle = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if idle.stdout.strip() == str(count):
            return
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log.name}: {log.read_text()[-1000:]}" for log in folder.glob("*.log"))
            pytest.fail(
                f"{count} machines are not idle after {START_S:g} s: {idle.stdout}{idle.stderr}\n{logs}"
            )
        time.sleep(0.05)
