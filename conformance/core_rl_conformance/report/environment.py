"""Where a session ran: what somebody needs who tries to get the same numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from core_rl.machine import describe_machine
from core_rl_conformance.report.model import Environment

__all__ = ["describe_environment"]


def describe_environment(distributions: Iterable[str] = ()) -> Environment:
    """This process and machine, with the versions of ``distributions`` and of what they and core-rl require."""
    return Environment(**dataclasses.asdict(describe_machine(distributions, extra="conformance")))
