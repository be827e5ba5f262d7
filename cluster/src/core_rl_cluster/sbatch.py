"""Jobs of Slurm: a script with a request and a command, handed to ``sbatch``."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core_rl.errors import ConfigError

__all__ = ["BatchJob", "submit_job"]

SCRIPT = "submit.sh"
LOG = "slurm-%j.log"
NOTICE_S = 120
"""Seconds from the signal to save a checkpoint to the end of a job's time."""
SBATCH_S = 120.0


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A job that Slurm has taken."""

    number: str
    script: Path
    log: Path


def submit_job(
    directory: Path,
    command: Sequence[str],
    env: Mapping[str, str],
    request: Mapping[str, object],
    options: Sequence[str] = (),
) -> BatchJob:
    """Have Slurm run ``command`` here, with the variables ``env``; script and log are in ``directory``.

    ``request`` has options of ``sbatch`` by name, None for defaults; ``options`` are written as they are. Raises
    `ConfigError` without ``sbatch``, and with its message where it refuses.
    """
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / SCRIPT
    script.touch(mode=0o700)
    lines = [
        "#!/bin/bash",
        "# Written by core-rl submit.",
        *(f"#SBATCH {option}" for option in (*_options(directory, request), *options)),
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in env.items()),
        f"exec {shlex.join(command)}",
        "",
    ]
    script.write_text("\n".join(lines), encoding="utf-8")
    number = _sbatch(script)
    return BatchJob(number=number, script=script, log=directory / LOG.replace("%j", number))


def _options(directory: Path, request: Mapping[str, object]) -> Iterator[str]:
    """The options of ``sbatch``, quoted as it reads them."""
    every_job = {
        "job-name": f"core-rl {directory.name}",
        "ntasks-per-node": 1,
        "chdir": Path.cwd(),
        "output": directory / LOG,
        "open-mode": "append",
        "signal": f"B:USR1@{NOTICE_S}",
    }
    for name, value in {**every_job, **request}.items():
        if value is not None:
            yield f"--{name}={shlex.quote(str(value))}"


def _sbatch(script: Path) -> str:
    """Hand ``script`` to Slurm; the number of the job."""
    program = shutil.which("sbatch")
    if program is None:
        raise ConfigError(
            f"sbatch was not found: run core-rl submit on a login node of the Slurm cluster; the script is {script}"
        )
    command = [program, "--parsable", str(script)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SBATCH_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"sbatch did not answer within {SBATCH_S:g} s; is Slurm's controller up (scontrol ping)? The script is "
            f"{script}"
        ) from error
    if done.returncode:
        raise ConfigError(
            f"sbatch refused the job: {done.stderr.strip()}\nfix: change cluster.scheduling; the script is {script}"
        )
    return done.stdout.strip().partition(";")[0]
