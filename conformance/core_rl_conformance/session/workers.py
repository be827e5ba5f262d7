"""Scheduling of the cases on the workers of pytest-xdist (``-n 2``)."""

from __future__ import annotations

import re
from collections.abc import Collection

import pytest
from xdist.scheduler import LoadScopeScheduling

from core_rl_conformance.session.items import PLAN

__all__ = ["CaseScheduling", "WorkerHooks", "unit_of"]

CASE = re.compile(r"(?P<module>[^/]*)\.py::[^\[]*\[.*?-(?P<model>[^-]+-(?:bfloat16|float32))")
"""The name of a case, as far as its model and dtype."""


def unit_of(nodeid: str, servers: Collection[str]) -> str:
    """The group of cases that run on one worker with the case ``nodeid``.

    The cases of one module, model and dtype: they ask for the same expected values. For ``servers`` all cases of
    a model: a server has one, and takes long to start with another.
    """
    found = CASE.search(nodeid)
    if found is None:
        return nodeid
    engines = nodeid.partition("[")[2]
    serves = any(engines.startswith(f"{name}-") or f"-with-{name}-" in engines for name in servers)
    return found["model"] if serves else f"{found['module']} {found['model']}"


class CaseScheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no annotations
    """Whole units, the largest first."""

    def _split_scope(self, nodeid: str) -> str:
        targets = self.config.stash[PLAN].targets
        return unit_of(nodeid, [target.spec.name for target in targets if target.spec.kind == "inference"])


class WorkerHooks:
    """Registered where pytest-xdist is installed."""

    @staticmethod
    def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> CaseScheduling | None:
        """Ours, unless ``--dist`` asks for another."""
        return CaseScheduling(config, log) if config.getoption("dist") == "load" else None
