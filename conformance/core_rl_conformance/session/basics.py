"""Levels of checks: of several failures, the most basic one is to be fixed first."""

from __future__ import annotations

from core_rl_conformance.catalogue import Check
from core_rl_conformance.session.matrix import Case

__all__ = ["Failures", "level"]

BASICS = {
    "I7.logprobs": 0,
    "I7.entropy": 1,
    "I8.temperature": 1,
    "I1.gradients": 2,
    "I1.micro-batches": 3,
    "I4.grad-norm": 3,
    "I1.train-batch": 4,
    "I20.adamw": 4,
}
"""Checks that others build on, the most basic ones first."""
MODULES = {
    "outputs": 1,
    "heads": 1,
    "contract": 1,
    "gradients": 3,
    "properties": 3,
    "steps": 5,
    "optimizer": 5,
    "frozen": 5,
    # of inference engines; ``updates`` come last, because they use up the server
    "rollouts": 0,
    "scores": 1,
    "rollout_contract": 1,
    "sampling": 3,
    "stops": 3,
}
"""The levels of the other checks, by module; what is not named here builds on everything."""


def level(check: Check) -> int:
    """The number of levels that ``check`` builds on; 0 is the most basic."""
    module = check.function.__module__.rpartition(".")[2]
    return BASICS.get(check.identifier, MODULES.get(module, 6))


class Failures:
    """The failed cases of one process so far."""

    def __init__(self) -> None:
        self._failed: set[tuple[str, ...]] = set()

    def add(self, case: Case) -> str:
        """Take a failed case; a line on the most basic check that fails too, or nothing."""
        place = (case.target.spec.name, str(case.setting), case.family, case.dtype)
        self._failed.add((case.check.identifier, *place))
        below = [
            identifier
            for identifier, number in BASICS.items()
            if number < level(case.check) and (identifier, *place) in self._failed
        ]
        return f"{below[0]} fails too: fix it first" if below else ""
