"""Faults of servers and of the wire to them: each dies by its check, through HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_proxy import Bend, FaultProxy
from mutants.zoo import Mutant
from reference_server import ReferenceServer
from served import SERVED, judge
from server_stub import running
from wire_faults import WIRE_FAULTS, WireFault

from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.expected_values import ExpectedValues
from core_rl_conformance.inputs.tiny_models import TinyModel

BY_DAY = {
    "log-probs of the token before",
    "a log-prob too few",
    "top-p ignored",
    "length for a stop",
    "answers of the request before",
    "most likely tokens swapped",
    "labels of the version after",
    "an update swallowed",
    "adds-bos",
    "reports-after-the-cut",
    "keeps-prefixes",
    "label-aborts-requests",
}
"""Faults of different kinds; the others die at night."""


def _parameters(faults: list[WireFault] | list[Mutant]) -> list[object]:
    return [
        pytest.param(fault, id=fault.name, marks=[] if fault.name in BY_DAY else [pytest.mark.nightly])
        for fault in faults
    ]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpectedValues]:
    with ExpectedValues(tmp_path_factory.mktemp("expected")) as values:
        yield values


@pytest.fixture(scope="module")
def server(expected: ExpectedValues) -> Iterator[ReferenceServer]:
    directory = expected.models.directory(TinyModel(family="llama"))
    with running([ReferenceServer(str(directory))]) as (server,):
        yield server


def _require_killed(message: str | None, killed_by: str, says: str) -> None:
    assert message is not None, f"{killed_by} passes"
    assert re.search(says, message), f"the message misses the cause:\n{message}"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fault", _parameters(WIRE_FAULTS))
def test_wire_fault_dies_by_its_check(
    expected: ExpectedValues, server: ReferenceServer, fault: WireFault, tmp_path: Path
) -> None:
    try:
        with running([FaultProxy(server.address, server.model, fault.bend())]) as (proxy,):
            message = judge(expected, proxy.address, server.model, fault.killed_by, tmp_path)
    finally:
        server.reset()
    _require_killed(message, fault.killed_by, fault.says)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mutant", _parameters(SERVED))
def test_served_mutant_dies_by_its_check(expected: ExpectedValues, mutant: Mutant, tmp_path: Path) -> None:
    assert issubclass(mutant.engine, ReferenceRolloutBackend)
    directory = str(expected.models.directory(TinyModel(family=mutant.family)))
    with running([ReferenceServer(directory, mutant.engine)]) as (server,):
        message = judge(expected, server.address, directory, mutant.killed_by, tmp_path)
    _require_killed(message, mutant.killed_by, mutant.says)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=[] if check == "I14.update-in-flight" else [pytest.mark.nightly])
        for check in sorted({f.killed_by for f in WIRE_FAULTS} | {m.killed_by for m in SERVED})
    ],
)
def test_correct_server_passes_behind_a_proxy(
    expected: ExpectedValues, server: ReferenceServer, check: str, tmp_path: Path
) -> None:
    try:
        with running([FaultProxy(server.address, server.model, Bend())]) as (proxy,):
            assert judge(expected, proxy.address, server.model, check, tmp_path) is None
    finally:
        server.reset()


def test_faults_are_many_and_named_apart() -> None:
    names = [fault.name for fault in WIRE_FAULTS] + [mutant.name for mutant in SERVED]
    assert len(set(names)) == len(names) >= 40
    assert set(names) >= BY_DAY
    assert {fault.killed_by for fault in WIRE_FAULTS} <= set(load_checks())
