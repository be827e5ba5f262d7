"""Sequences of calls that hypothesis draws from a seed, and reduces where one fails."""

from __future__ import annotations

import textwrap

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_state_machine(
    machine: type[RuleBasedStateMachine], fields: dict[str, object], number: int, examples: int, calls: int
) -> None:
    """Run ``examples`` sequences of up to ``calls`` calls of ``machine`` with ``fields``, drawn by the seed ``number``.

    Raises the `AssertionError` of the smallest failing sequence, with its calls.
    """
    try:
        run_state_machine_as_test(
            seed(number)(type("Calls", (machine,), fields)),
            settings=settings(
                max_examples=examples,
                stateful_step_count=calls,
                database=None,
                deadline=None,
                report_multiple_bugs=False,
                print_blob=False,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
    except AssertionError as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        raise AssertionError(f"{error}\n{textwrap.indent(notes, '  ')}") from None
