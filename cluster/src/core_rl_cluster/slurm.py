"""`SlurmHosts`: machines of a Slurm allocation, on which one step of ``srun`` starts the agents."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import IO

from core_rl.errors import ClusterError, ConfigError
from core_rl_cluster.agent_hosts import AGENT, AgentHosts
from core_rl_cluster.hello import KEY_VARIABLE

__all__ = ["SlurmHosts"]

logger = logging.getLogger(__name__)

KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTER_NAME", "SLURM_JWT", "SLURM_WORKING_CLUSTER")
"""Variables by which Slurm's commands find their cluster. Others shape a step after the batch script's own: a
``--gpus-per-task`` of it would give an agent the devices of one task."""
SHAPING = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
OF_ONE_MACHINE = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that Slurm sets on each machine."""
NODES_OF_JOB = re.compile(r" NodeList=(?P<nodes>\S+)")
STATE_OF_NODE = re.compile(r"^NodeName=(?P<name>\S+) .*? State=(?P<state>\S+)", re.MULTILINE)
UNREACHED = re.compile(r"failed on node (\S+): Communication")
"""Output of srun about a node that does not answer."""
COMMAND_S = 30.0
"""The longest answer of Slurm's controller."""
LAST_LINES = 20
"""Lines of srun's output in a message."""
END_S = 10.0
"""Seconds for the step to end, once its agents were let go."""
GRACE_S = 1.0
"""Seconds from SIGTERM to SIGKILL. After the first, srun ends its tasks and leaves nothing for Slurm to clean up."""
LOOK_S = 1.0
"""Between two looks at nodes that do not respond."""


@dataclass(eq=False, repr=False)
class SlurmHosts(AgentHosts):
    """The first ``machines`` nodes of the Slurm allocation that the driver runs in, by ``salloc`` or ``sbatch``.

    ``nodelist`` and ``exclude`` choose among them, in Slurm's notation. ``container_image`` is for Slurm with pyxis,
    ``python`` the interpreter on the nodes, and ``srun_arguments`` go to ``srun`` as they are. The step takes all CPUs,
    memory and devices that the allocation has on each node; with ``overlap=False`` it waits until no other step uses
    them. For the rest see `AgentHosts`.

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
        self._usable = _usable_nodes(self._job, self.machines, self.nodelist, self.exclude)
        self._unreached: set[str] = set()
        """Nodes on which a step could not be started; Slurm may not know for minutes that they have failed."""
        self._step: _Step | None = None
        self._launched: tuple[str, bytes] = ("", b"")

    def _launch(self, driver: str, key: bytes) -> None:
        self._launched = driver, key
        python = self.python or ("python3" if self.container_image else sys.executable)
        agent = [python, *AGENT, f"--driver={driver}", f"--wait={self.wait_s:g}", "--with-parent"]
        nodes = self._nodes_there()
        shape = [
            f"--nodes={len(nodes)}",
            f"--ntasks={len(nodes)}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(nodes)}",
        ]
        # All that the job has on a node, also where the batch script has shared it out among tasks.
        share = ["--mem=0", "--cpu-bind=none", "--mpi=none", "--export=ALL", "--kill-on-bad-exit=1"]
        command = ["srun", f"--jobid={self._job}", *shape, *share, *self._options(), *agent]
        self._step = _Step(command, _environment(os.environ, key))

    def _nodes_there(self) -> list[str]:
        """The first nodes that the job still has and that respond, for which it waits while there is time.

        A job that was allocated with ``--no-kill`` continues without nodes that have failed. Raises `ClusterError`.
        """
        while True:
            states = _states(self._job)
            may_come = [name for name in self._usable if name in states and name not in self._unreached]
            present = [name for name in may_come if _responds(states[name])]
            if len(present) >= self.machines or len(may_come) < self.least or not self.time_left():
                break
            time.sleep(LOOK_S)
        if len(present) < self.least:
            raise ClusterError(
                f"{len(present)} of {self.machines} machines are there: "
                + ", ".join(f"{name} {states.get(name, 'is lost to the job')}" for name in self._usable)
                + f"; see scontrol show job {self._job}"
            )
        self.expect(min(len(present), self.machines))
        return present[: self.machines]

    def _options(self) -> list[str]:
        """Return the caller's options for ``srun``."""
        image = [] if self.container_image is None else [f"--container-image={self.container_image}"]
        return [*(["--overlap"] if self.overlap else []), *image, *self.srun_arguments]

    def _check_launched(self) -> None:
        if self._step is None or (failure := self._step.failure()) is None:
            return
        unreached = set(UNREACHED.findall(failure)) - self._unreached
        self._unreached |= unreached
        reachable = [name for name in self._usable if name not in self._unreached]
        if not unreached or len(reachable) < self.least:
            raise ClusterError(f"{failure}; see also scontrol show job {self._job}")
        logger.warning("Slurm cannot start a step on %s; others are tried", ", ".join(sorted(unreached)))
        self._end_launched()
        self.let_go()
        self.launch_in_time(*self._launched)

    def _end_launched(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.end()


class _Step:
    """``srun``, whose errors are shown and remembered. It passes on the end of its standard input, which also a
    ``kill -9`` of the driver closes: then agents end, and the step with them.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        # A session of its own: Ctrl-C is the driver's, and srun would end the step.
        self._process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
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
        """Wait for the end of the step, and end srun if that takes too long."""
        assert self._process.stdin is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._process.stdin.close()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        self._process.kill()
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


def _usable_nodes(job: str, machines: int, nodelist: str | None, exclude: str | None) -> list[str]:
    """The nodes of the allocation for at least ``machines`` machines, in its order; raises `ConfigError`."""
    names = os.environ.get("SLURM_JOB_NODELIST", "")
    allocated = _host_names(names, "SLURM_JOB_NODELIST")
    listed = allocated if nodelist is None else _host_names(nodelist, "nodelist")
    if unknown := [name for name in listed if name not in allocated]:
        raise ConfigError(
            f"nodelist = {nodelist!r}: {', '.join(unknown)} not among the nodes of job {job} ({names})"
        )
    left_out = set() if exclude is None else set(_host_names(exclude, "exclude"))
    usable = [name for name in allocated if name in listed and name not in left_out]
    if len(usable) < machines:
        limited = "" if len(usable) == len(allocated) else f", of which {len(usable)} may be used"
        raise ConfigError(
            f"machines = {machines}, and job {job} has {len(allocated)} nodes ({names}){limited}; allocate more "
            f"(--nodes={machines}), or use fewer machines"
        )
    return usable


def _states(job: str) -> dict[str, str]:
    """Slurm's states of the nodes that ``job`` has now; raises `ClusterError`."""
    shown = _scontrol("show", "--oneliner", "job", job)
    if shown.returncode != 0 or (listed := NODES_OF_JOB.search(shown.stdout)) is None:
        raise ClusterError(f"Slurm's job {job} is not there any more: {shown.stderr.strip()}")
    nodes = _scontrol("show", "--oneliner", "node", listed["nodes"])
    return {match["name"]: match["state"] for match in STATE_OF_NODE.finditer(nodes.stdout)}


def _responds(state: str) -> bool:
    """Whether a step can be started on a node in ``state``: ``*`` is what Slurm adds when it hears nothing."""
    return "*" not in state and not state.startswith(("DOWN", "FAIL"))


def _host_names(nodes: str, field: str) -> list[str]:
    """The single names in Slurm's notation, such as ``node[0-3,7]``; raises `ConfigError`."""
    done = _scontrol("show", "hostnames", nodes)
    if done.returncode != 0 or not done.stdout.split():
        raise ConfigError(f"{field} = {nodes!r} names no nodes: {done.stderr.strip()}")
    return done.stdout.split()


def _scontrol(*words: str) -> subprocess.CompletedProcess[str]:
    """Return the output of ``scontrol``; raises `ConfigError` where it does not answer."""
    try:
        return subprocess.run(
            ["scontrol", *words], capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"scontrol did not answer within {COMMAND_S:g} s; is Slurm up here?") from error


def _environment(of_driver: Mapping[str, str], key: bytes) -> dict[str, str]:
    """The environment of ``srun``, which passes it on to the agents."""
    inherited = {
        name: value
        for name, value in of_driver.items()
        if name in KEPT or not (name.startswith(SHAPING) or name in OF_ONE_MACHINE)
    }
    return {**inherited, KEY_VARIABLE: key.hex()}
