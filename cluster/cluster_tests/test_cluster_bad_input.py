"""Machines that cannot be used: one error in time with a remedy, and no process left."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import group_support as support
import pytest
import training_support as runs
from pretend_machines import DRIVER_ADDRESS, within
from ray_cluster import Cluster
from rich.console import Console

from core_rl.errors import ConfigError
from core_rl_cluster import RayHosts
from core_rl_trainer import train

OTHER_VERSION = (
    "import core_rl_cluster.ray as r; v = r.versions; r.versions = lambda: v() | {'torch': '2.0.0'}; "
)


def opening(machines: int, resources: dict[str, float] | None = None, wait_s: int = 4) -> str:
    """A program that opens hosts; ``wait_s`` is short where the nodes can never be given."""
    arguments = f"{machines}, 2, wait_s={wait_s}, resources={resources or {}}"
    return f"from core_rl_cluster import RayHosts; RayHosts({arguments}).open()"


@pytest.fixture(autouse=True)
def nothing_left(cluster: Cluster) -> Iterator[None]:
    yield
    assert within(lambda: not cluster.left()), cluster.left()


def refusal(code: str, **environ: str) -> str:
    """The last line of a program that opens hosts, and fails with an error of core-rl."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environ}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    return done.stderr.partition("core_rl.errors.")[2]


UNUSABLE: dict[str, tuple[str, dict[str, str], str]] = {
    "too few nodes": (
        opening(9),
        {},
        r"Ray did not give 9 nodes with CPU 2 each within 4 s. Of 5 nodes 4 are large",
    ),
    "too few GPUs": (opening(2, {"GPU": 2}), {}, r"node\d .*lacks GPU 2"),
    "other versions": (
        OTHER_VERSION + opening(1, wait_s=40),
        {},
        r"machine 0 \(node\d.* has torch 2\.13\S+, and the driver torch 2\.0",
    ),
    "no cluster": (opening(1), {"RAY_ADDRESS": f"{DRIVER_ADDRESS}:1"}, r"no Ray cluster"),
    "another token": (opening(1), {"RAY_AUTH_TOKEN": "0" * 64}, r"no Ray cluster at .*oken"),
    "no token": (opening(1), {"RAY_AUTH_MODE": ""}, r"RAY_AUTH_MODE = ''"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_clusters_are_refused_in_time(cluster: Cluster, case: str) -> None:
    code, environ, message = UNUSABLE[case]
    text = refusal(code, **environ)
    assert re.search(message, text), text


def test_unshared_directories_are_named(cluster: Cluster, start: Path) -> None:
    directory = Path("/dev/shm/output-of-a-test")  # each machine has its own
    section = {"type": "ray", "machines": 2, "ranks_per_machine": 1, "wait_s": 60.0}
    engines = {"engine": "fsdp", "engines": {"fsdp": {"layout": {"dp": 2}}}}
    try:
        with pytest.raises(ConfigError, match="output_dir.*do not see the same files"):
            train(
                runs.recipe_values(start, directory, **engines, cluster=section), console=Console(quiet=True)
            )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize(
    ("degrees", "settings", "message"),
    [
        ({"dp": 5}, {}, r"a layout of 5 ranks, and machines \[0, 1\] have places for 4, 2 each"),
        ({"dp": 2}, {"machines": [1, 2]}, r"machines = \[1, 2\]: there are \[0, 1\]"),
        ({"dp": 2}, {"machines": [1, 1]}, r"machines = \[1, 1\]: there are \[0, 1\]"),
        ({"dp": 3}, {"devices": [0]}, r"a layout of 3 ranks, .* places for 2, 1 each"),
        ({"dp": 2}, {"devices": [0, 0]}, r"devices = \[0, 0\]; name different devices"),
    ],
)
def test_too_few_places_are_refused_before_anything_starts(
    degrees: dict[str, int], settings: dict[str, list[int]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        support.echo_group(support.SPEC, support.config(**degrees), hosts=RayHosts(2, 2), **settings)
