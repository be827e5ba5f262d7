"""Slurm on pretend machines starts, runs steps on all of them and ends.

It takes machines that are idle: after a job, a slow machine may still be completing it, and another one is taken.
"""

from __future__ import annotations

from pathlib import Path

from pretend_machines import within
from slurm_daemons import Slurm

MACHINES = {"node0", "node1", "node2"}


def test_a_step_runs_on_each_machine(slurm: Slurm) -> None:
    printed = slurm.command("srun", "-N2", "--ntasks-per-node=1", "-l", "hostname")
    ranks, machines = zip(*(line.split(": ") for line in printed.splitlines()), strict=True)
    assert sorted(ranks) == ["0", "1"]
    assert len(set(machines) & MACHINES) == 2


def test_an_allocation_gives_its_variables_and_ends(slurm: Slurm) -> None:
    with slurm.allocation(2) as variables:
        machines = slurm.command("scontrol", "show", "hostnames", variables["SLURM_JOB_NODELIST"]).split()
        assert len(set(machines) & MACHINES) == len(machines) == 2
        assert slurm.command("squeue", "-h", "-o", "%T").split() == ["RUNNING"]
    assert "RUNNING" not in slurm.command("squeue", "-h", "-o", "%T")


def test_a_batch_script_runs_on_the_first_machine(slurm: Slurm, tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    slurm.command("sbatch", "-N2", f"--output={printed}", "--wrap=hostname; srun -N2 hostname")
    assert within(lambda: not slurm.command("squeue", "-h"), 60)
    first, *rest = printed.read_text().split()
    assert first == min(rest)
    assert len(set(rest) & MACHINES) == len(rest) == 2
