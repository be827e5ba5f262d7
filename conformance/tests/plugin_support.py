"""Sessions of the suite inside a test: engines that only this process knows, and the leftovers of a session."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mutants.zoo import spec_of

from core_rl.config.capability import Capability
from core_rl.launch.process import start_fork_server
from core_rl.registry.engines import register_engine
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.profile import Profile

PROFILES: dict[str, Profile] = {}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EngineSpec]]:
    """Registers an engine class under the name of its class, with a profile, for one test."""
    start_fork_server()  # not a process that a session leaves behind
    registrations = []

    def add(
        kind: type, profile: Profile | None = None, capabilities: frozenset[Capability] | None = None
    ) -> EngineSpec:
        spec = spec_of(kind)
        spec = replace(spec, capabilities=spec.capabilities - {Capability.DATA_PARALLEL})
        if capabilities is not None:
            spec = replace(spec, capabilities=capabilities)
        if profile is not None:
            attribute = f"PROFILE_{len(PROFILES)}"
            PROFILES[attribute] = profile
            monkeypatch.setattr(sys.modules[__name__], attribute, profile, raising=False)
            spec = replace(spec, conformance=f"{__name__}:{attribute}")
        registrations.append(register_engine(spec))
        return spec

    yield add
    for registration in registrations:
        registration.close()


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """A session in this process, whose engines it knows."""
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:randomly", *arguments)


def run_checks(pytester: pytest.Pytester, name: str, filter_: str, *arguments: str) -> pytest.RunResult:
    return run(pytester, f"--engine={name}", "--pyargs", "core_rl_conformance", "-k", filter_, *arguments)


def children() -> set[str]:
    """The processes that this one has started and that live, the fork server among them."""
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return set(path.read_text().split()) if path.exists() else set()
