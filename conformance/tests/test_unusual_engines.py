"""No false alarm: correct engines of unusual make pass, whatever the seed. And faults together fail many checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mutants.all_at_once import EveryFault
from mutants.bases import Packed
from mutants.unusual import UNUSUAL, OptimizerInHooks, SortsByLength
from mutants.zoo import CAPABILITIES, C
from plugin_support import engine, run

from core_rl.config.layout import ParallelLayout
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.profile import Profile

__all__ = ["engine"]

pytest_plugins = ["pytester"]

LAYOUTS = (ParallelLayout(), ParallelLayout(dp=2))
PROFILE = Profile(layouts=LAYOUTS)
IN_HALF = Profile(layouts=LAYOUTS, dtypes=("float32", "bfloat16"), families=("llama",))
FULL_EVERY = 10
"""Of so many seeds, the last has a full session."""
ENOUGH = 12
"""Checks that fail on an engine with every fault."""
Add = Callable[..., EngineSpec]


def declared(kind: type[Packed]) -> frozenset[C]:
    """The capabilities of an unusual engine; hooks know no names, and layers no order but their own."""
    missing = {OptimizerInHooks: {C.OPTIMIZER_RULES, C.MUON}, SortsByLength: {C.TAPS}}
    return CAPABILITIES - missing.get(kind, set())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Three seeds, or ``--seeds`` of them from ``--first-seed`` on."""
    if "seed" in metafunc.fixturenames:
        first, count = (metafunc.config.getoption(name) for name in ("first_seed", "seeds"))
        metafunc.parametrize("seed", range(first, first + (count or 3)))


def session(pytester: pytest.Pytester, spec: EngineSpec, *arguments: str) -> dict[str, int]:
    """Outcomes of a session of the whole suite."""
    result = run(pytester, f"--engine={spec.name}", "--pyargs", "core_rl_conformance", *arguments)
    return result.parseoutcomes()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", UNUSUAL, ids=lambda kind: kind.__name__)
def test_correct_engines_raise_no_alarm(
    pytester: pytest.Pytester, engine: Add, kind: type[Packed], seed: int
) -> None:
    arguments = [f"--seed={seed}", *([] if seed % FULL_EVERY == FULL_EVERY - 1 else ["--quick"])]
    result = session(pytester, engine(kind, PROFILE, declared(kind)), *arguments)
    assert "failed" not in result and result["passed"] > ENOUGH


@pytest.mark.nightly
def test_faulty_engine_fails_many_quick_checks(pytester: pytest.Pytester, engine: Add) -> None:
    result = session(pytester, engine(EveryFault, IN_HALF, CAPABILITIES | {C.BFLOAT16}), "--quick")
    assert result["failed"] >= ENOUGH
