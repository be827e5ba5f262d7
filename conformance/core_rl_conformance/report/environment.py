"""Where a session ran: what somebody needs who tries to get the same numbers."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import importlib_metadata as metadata

from core_rl_conformance.report.model import Environment

__all__ = ["describe_environment"]

CORE = "core-rl"
CPU_INFO = Path("/proc/cpuinfo")
SUITE_EXTRA = re.compile(r"""extra == ['"]conformance['"]""")
REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*")


def describe_environment(distributions: Iterable[str] = ()) -> Environment:
    """This process and machine, with the versions of ``distributions`` and of what they and core-rl require."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Environment(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        gpus=tuple(gpus),
        packages=_versions([CORE, *distributions]),
    )


def _processor() -> str:
    try:
        lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]} ({platform.machine()})" if models else platform.processor() or platform.machine()


def _versions(distributions: Iterable[str]) -> dict[str, str]:
    names = {name for distribution in distributions for name in [distribution, *_requirements(distribution)]}
    versions = {_normalized(name): _version(name) for name in names}
    return {name: version for name, version in sorted(versions.items()) if version is not None}


def _requirements(distribution: str) -> Iterator[str]:
    """The direct requirements, those of extras included (what is not installed is left out later).

    Of the core's extras only that of the suite counts: the others are tools, and engines that are not checked.
    """
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return
    if distribution == CORE:
        lines = [line for line in lines if "extra ==" not in line or SUITE_EXTRA.search(line)]
    yield from (match[0] for line in lines if (match := REQUIREMENT.match(line)))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
