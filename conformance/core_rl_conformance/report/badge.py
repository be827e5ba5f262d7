"""Named profiles, which are sets of capabilities, and a badge for an engine that has one of them certified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

from core_rl.config.capability import Capability
from core_rl.errors import ConfigError
from core_rl.pages import page_environment
from core_rl_conformance.report.html import TEMPLATES
from core_rl_conformance.report.model import CapabilityState, EngineRecord, Report, Verdict

_SFT = frozenset({Capability.SHARDED_CHECKPOINT, Capability.PORTABLE_CHECKPOINT})
_SYNC = frozenset({Capability.SYNC_DISK, Capability.SYNC_TENSOR})
_SERVES = frozenset({Capability.SCORE, *_SYNC})
PROFILES: Mapping[str, Mapping[str, frozenset[Capability]]] = {
    "sft": {"train": _SFT},
    "rl-sync": {"train": _SFT | _SYNC | {Capability.OFFLOAD}, "inference": _SERVES},
    "rl-async": {
        "train": _SFT | _SYNC | {Capability.SYNC_DISTRIBUTED},
        "inference": _SERVES | {Capability.SYNC_DISTRIBUTED, Capability.PAUSE},
    },
    "moe": {"train": frozenset({Capability.MOE, Capability.AUX_LOSS, Capability.ROUTING_REPLAY})},
    "lora": {
        "train": frozenset({Capability.LORA, Capability.SYNC_LORA}),
        "inference": frozenset({Capability.SYNC_LORA}),
    },
    "vlm": {"train": frozenset({Capability.VISION})},
}
"""Capabilities by profile and kind of engine."""
FRESH_FOR = timedelta(days=30)
"""After this a badge is grey: versions have moved on."""
COLORS = {True: "#2e7d32", False: "#c62828", None: "#757575"}
WIDTH_OF_LETTER = 6.6
"""Pixels, on average, of the font of a badge."""


def lacking(engine: EngineRecord, profile: str) -> list[str]:
    """Reasons why ``engine`` has not shown ``profile``; empty where it has.

    Raises `ConfigError` for an unknown profile, and for a profile of another kind of engine.
    """
    kinds = PROFILES.get(profile)
    if kinds is None:
        raise ConfigError(f"there is no profile {profile!r}; there are {', '.join(PROFILES)}")
    if engine.kind not in kinds:
        raise ConfigError(
            f"profile {profile!r} is for {' and '.join(kinds)} engines, and {engine.name!r} is an {engine.kind} engine"
        )
    states = {record.name: record for record in engine.capabilities}
    reasons = (
        [f"the verdict is {engine.verdict}"] if engine.verdict in (Verdict.FAILED, Verdict.NOT_RUN) else []
    )
    for capability in sorted(kinds[engine.kind]):
        record = states.get(capability)
        if record is None:
            reasons.append(f"{capability} is not declared")
        elif record.state is not CapabilityState.CERTIFIED:
            reasons.append(f"{capability} is {record.state}: {record.reason}")
    return reasons


def badge(report: Report, engine: EngineRecord, profile: str, now: datetime) -> str:
    """An SVG image with the state of ``profile``, the version and the date; grey where the report is 30 days old.

    Raises what `lacking` raises.
    """
    certified = not lacking(engine, profile)
    old = now - report.created > FRESH_FOR
    label = f"core-rl {profile}"
    words = "certified" if certified else "not certified"
    value = f"{words} {engine.version}, {report.created.date().isoformat()}"
    left, right = (round(WIDTH_OF_LETTER * len(text)) + 12 for text in (label, value))
    template = page_environment(TEMPLATES).get_template("badge.svg.jinja")
    return template.render(
        label=label, value=value, left=left, right=right, color=COLORS[None if old else certified]
    )


def badge_of(reports: Sequence[Report], profile: str) -> str:
    """The badge of today for the one engine of one report. Raises `ConfigError` for more, and what `lacking` raises."""
    engines = [(report, engine) for report in reports for engine in report.engines]
    if len(engines) != 1:
        names = ", ".join(engine.name for _, engine in engines)
        raise ConfigError(
            f"--badge is of one engine, and the reports have {names}; name a report of one engine"
        )
    return badge(*engines[0], profile, datetime.now(UTC))
