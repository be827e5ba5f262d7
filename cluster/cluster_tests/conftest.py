"""The Ray cluster of all tests, on pretend machines.

There is one: threads of Ray outlive a connection, and stay in the network in which the first one was made. So tests
that lose machines run last, in the order of the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import training_support
from ray_cluster import Cluster, ray_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ray_cluster(4, tmp_path_factory.getbasetemp()) as made:
        yield made


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with data, for recipes."""
    return training_support.make_start(
        tmp_path_factory.mktemp("start"), head_size=32
    )  # which vLLM has on CPUs
