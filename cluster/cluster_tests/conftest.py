"""Real Slurm on pretend machines, for tests of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pretend_machines import Machine, pretend_machines
from slurm_daemons import Slurm, slurm_daemons


@pytest.fixture(scope="module")
def slurm_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    with pretend_machines(3, [tmp_path_factory.getbasetemp()]) as made:
        yield made


@pytest.fixture(scope="module")
def slurm(slurm_machines: list[Machine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_daemons(slurm_machines, tmp_path_factory.mktemp("slurm")) as running:
        yield running
