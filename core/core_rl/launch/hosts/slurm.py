"""`SlurmHosts`: machines of a Slurm allocation, on which one step of ``srun`` starts the agents."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import IO

from core_rl.distributed.authentication import new_key
from core_rl.errors import ClusterError, ConfigError
from core_rl.launch.hosts import lifeline
from core_rl.launch.hosts.agent_hosts import AGENT, AgentHosts
from core_rl.launch.hosts.key import KEY_VARIABLE

__all__ = ["SlurmHosts"]

KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTER_NAME", "SLURM_JWT", "SLURM_WORKING_CLUSTER")
"""Variables by which Slurm's commands find their cluster. Others shape a step after the batch script's own: a
``--gpus-per-task`` of it would give an agent the devices of one task."""
SHAPING = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
OF_ONE_MACHINE = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Slurm sets those of each machine."""
COMMAND_S = 30.0
"""The longest answer of Slurm's controller."""
LAST_LINES = 20
"""Of srun's output, for a message."""
END_S = 10.0
"""Seconds for the step to end, once its agents were let go."""


@dataclass(eq=False, repr=False)
class SlurmHosts(AgentHosts):
    """The first ``machines`` nodes of the Slurm allocation that the driver runs in, by ``salloc`` or ``sbatch``.

    ``nodelist`` and ``exclude`` choose among them, in Slurm's notation. ``container_image`` is for Slurm with pyxis,
    ``python`` the interpreter on the nodes, and ``srun_arguments`` go to ``srun`` as they are. The step takes all CPUs,
    memory and devices that the allocation has on each node; with ``overlap=False`` it waits until no other step uses
    them. The rest is as `AgentHosts` says.

    Raises `ConfigError` outside of an allocation, without ``srun``, and for too few nodes.
    """

    _: KW_ONLY
    nodelist: str | None = None
    exclude: str | None = None
    container_image: str | None = None
    python: str | None = None
    overlap: bool = True
    srun_arguments: Sequence[str] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._job = _job_id()
        self._nodes = _chosen_nodes(self._job, self.machines, self.nodelist, self.exclude)
        self._step: _Step | None = None

    def _key(self) -> bytes:
        return new_key()

    def _launch(self, driver: str, key: bytes) -> None:
        python = self.python or ("python3" if self.container_image else sys.executable)
        agent = [python, *AGENT, f"--driver={driver}", f"--wait={self.wait_s:g}"]
        count = len(self._nodes)
        shape = [
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(self._nodes)}",
        ]
        # All that the job has on a node, also where the batch script has shared it out among tasks.
        share = ["--mem=0", "--cpu-bind=none", "--mpi=none", "--export=ALL", "--kill-on-bad-exit=1"]
        command = ["srun", f"--jobid={self._job}", *shape, *share, *self._options(), *agent]
        self._step = _Step(command, _environment(os.environ, key))

    def _options(self) -> list[str]:
        """What the caller chose for ``srun``."""
        image = [] if self.container_image is None else [f"--container-image={self.container_image}"]
        return [*(["--overlap"] if self.overlap else []), *image, *self.srun_arguments]

    def _check_launched(self) -> None:
        if self._step is not None and (failure := self._step.failure()) is not None:
            raise ClusterError(f"{failure}; see also scontrol show job {self._job}")

    def _end_launched(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.end()


class _Step:
    """``srun``, whose errors are shown and remembered; it ends with the driver."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        # A session of its own: Ctrl-C is the driver's, and srun would end the step.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", lifeline.__file__, *command],
            env=environ,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._show, args=(self._process.stderr,), daemon=True)
        self._reader.start()

    def failure(self) -> str | None:
        """A phrase about the end of srun, with its output; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._reader.join(1.0)
        lines = "\n".join(self._last) or "(no output)"
        return f"srun ended with exit code {code} before all machines were there:\n{lines}\n"

    def end(self) -> None:
        """Wait for the end of the step, and kill srun if that takes too long."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join(1.0)

    def _show(self, errors: IO[bytes]) -> None:
        with errors:
            for line in errors:
                text = line.decode(errors="replace")
                self._last.append(text.rstrip())
                sys.stderr.write(text)


def _job_id() -> str:
    """The job of the allocation around this process; raises `ConfigError`."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job:
        raise ConfigError(
            "this process is in no Slurm allocation (SLURM_JOB_ID is not set); start the driver in one, by "
            "salloc --nodes=N or in a script for sbatch --nodes=N"
        )
    missing = [command for command in ("srun", "scontrol") if shutil.which(command) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not found on PATH, and Slurm's job {job} needs them to reach its nodes; add the "
            "directory of Slurm's commands to PATH, in a container mount it"
        )
    return job


def _chosen_nodes(job: str, machines: int, nodelist: str | None, exclude: str | None) -> list[str]:
    """The nodes for ``machines`` machines, in the order of the allocation; raises `ConfigError`."""
    names = os.environ.get("SLURM_JOB_NODELIST", "")
    there = _host_names(names, "SLURM_JOB_NODELIST")
    wanted = there if nodelist is None else _host_names(nodelist, "nodelist")
    if unknown := [name for name in wanted if name not in there]:
        raise ConfigError(
            f"nodelist = {nodelist!r}: {', '.join(unknown)} not among the nodes of job {job} ({names})"
        )
    left_out = set() if exclude is None else set(_host_names(exclude, "exclude"))
    usable = [name for name in there if name in wanted and name not in left_out]
    if len(usable) < machines:
        chosen = "" if len(usable) == len(there) else f", of which {len(usable)} may be used"
        raise ConfigError(
            f"machines = {machines}, and job {job} has {len(there)} nodes ({names}){chosen}; allocate more "
            f"(--nodes={machines}), or use fewer machines"
        )
    return usable[:machines]


def _host_names(nodes: str, field: str) -> list[str]:
    """The single names in Slurm's notation, such as ``node[0-3,7]``; raises `ConfigError`."""
    try:
        command = ["scontrol", "show", "hostnames", nodes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"scontrol did not answer within {COMMAND_S:g} s; is Slurm up here?") from error
    if done.returncode != 0 or not done.stdout.split():
        raise ConfigError(f"{field} = {nodes!r} names no nodes: {done.stderr.strip()}")
    return done.stdout.split()


def _environment(of_driver: Mapping[str, str], key: bytes) -> dict[str, str]:
    """The environment of ``srun``, which passes it on to the agents."""
    inherited = {
        name: value
        for name, value in of_driver.items()
        if name in KEPT or not (name.startswith(SHAPING) or name in OF_ONE_MACHINE)
    }
    return {**inherited, KEY_VARIABLE: key.hex()}
