"""A description of the machine and its packages, for reproducing measured numbers."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import importlib_metadata as metadata

CORE = "core-rl"
EXTRA = re.compile(r"""extra == ['"]([\w.-]+)['"]""")
REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A process and the machine that it runs on."""

    python: str
    system: str
    processor: str
    cores: int
    """Cores that this process may use."""
    threads: int
    """Threads of torch in this process."""
    gpus: tuple[str, ...]
    packages: dict[str, str]
    """Versions of distributions and their requirements."""


def describe_machine(distributions: Iterable[str] = (), extra: str | None = None) -> Machine:
    """This process and machine, with the versions of ``distributions`` and of what they and core-rl require.

    Of core-rl's extras only ``extra`` counts: the others are tools, and engines that are not at work.
    """
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    kind = platform.machine()
    return Machine(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{platform.system()} {platform.release()}",
        processor=f"{models[0]} ({kind})" if models else platform.processor() or kind,
        cores=cpu_cores(),
        threads=torch.get_num_threads(),
        gpus=tuple(gpus),
        packages=_versions([CORE, *distributions], extra),
    )


def cpu_cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def most_open_files() -> int:
    """Files that this process may open, after its soft limit was raised to its hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # no limit at all is more than some systems allow
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _versions(distributions: Iterable[str], extra: str | None) -> dict[str, str]:
    names = {
        name for distribution in distributions for name in [distribution, *_requirements(distribution, extra)]
    }
    versions = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions[re.sub(r"[-_.]+", "-", name).lower()] = metadata.version(name)
    return dict(sorted(versions.items()))


def _requirements(distribution: str, extra: str | None) -> Iterator[str]:
    """Direct requirements, extras included; missing packages are left out later."""
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return
    for line in lines:
        condition = EXTRA.search(line)
        if distribution == CORE and condition is not None and condition[1] != extra:
            continue
        if match := REQUIREMENT.match(line):
            yield match[0]
