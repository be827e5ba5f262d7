"""Verdicts from results: the declared capabilities that an engine has shown, and profiles, which are sets of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from core_rl.config.capability import Capability
from core_rl.errors import ConfigError
from core_rl_conformance.catalogue import Check, TargetKind
from core_rl_conformance.outcomes import CaseRecord, Outcome
from core_rl_conformance.report.model import (
    CapabilityRecord,
    CapabilityState,
    CheckRecord,
    EngineRecord,
    Verdict,
)

LAYOUTS = frozenset(
    {
        Capability.DATA_PARALLEL,
        Capability.TENSOR_PARALLEL,
        Capability.SEQUENCE_PARALLEL,
        Capability.PIPELINE_PARALLEL,
        Capability.CONTEXT_PARALLEL,
        Capability.EXPERT_PARALLEL,
    }
)
ANY_CHECK = LAYOUTS | {Capability.BFLOAT16, Capability.CUDA}
"""Capabilities of the place of a run: every check counts for these."""
EXACT_IN_BFLOAT16: Mapping[str, str] = {
    "I20.bfloat16-steps": "master weights and optimizer steps",
    "I20.bfloat16-sums": "sums of gradients over micro-batches",
    "I20.bfloat16-upcasts": "final norm, temperature, softmax and scalar heads",
    "I20.bfloat16-rotary": "rotary positions",
}
"""Claims of each check, to the accuracy of float32."""
ROUNDED = (
    "to 4 times the rounding error of the plain model in bfloat16, up to some nats for a single log-prob"
)
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


def needs_of(checks: Iterable[Check | CheckRecord], kind: TargetKind) -> dict[str, Collection[str]]:
    """Capabilities that each check for engines of ``kind`` requires, without pairs."""
    return {c.identifier: c.requires for c in checks if c.kind == kind and c.partner is None}


def certify(
    declared: Iterable[str], results: Sequence[CaseRecord], needs: Mapping[str, Collection[str]]
) -> tuple[CapabilityRecord, ...]:
    """The state of each declared capability by the ``results`` of one engine, without pairs.

    ``needs`` are the capabilities that each check of engines of this kind requires: a check that the command
    line left out has no result at all.
    """
    counted = [case for case in results if not case.partner]
    tried = [case for case in counted if case.outcome is not Outcome.NOT_SUPPORTED]
    ran = {name for case in tried if case.outcome is not Outcome.NOT_RUN for name in case.capabilities}
    unknown = frozenset({name for case in tried for name in case.capabilities} - ran - ANY_CHECK)
    present = {case.check for case in results}
    absent = {check: required for check, required in needs.items() if check not in present}
    return tuple(
        _certify(
            name,
            [
                case
                for case in counted
                if name in case.capabilities and not (name in ANY_CHECK and _is_about(case, unknown))
            ],
            sorted(check for check, required in absent.items() if name in required or name in ANY_CHECK),
            needs,
        )
        for name in sorted(declared)
    )


def _is_about(case: CaseRecord, unknown: frozenset[str]) -> bool:
    """Whether ``case`` was not run for want of its own capability: it proves nothing about its layout."""
    return case.outcome is Outcome.NOT_RUN and not unknown.isdisjoint(case.capabilities)


def _certify(
    name: str, cases: Sequence[CaseRecord], absent: Sequence[str], needs: Mapping[str, Collection[str]]
) -> CapabilityRecord:
    """Cases that are not supported for want of another capability do not count for this one."""
    state, reason = _state(cases, absent)
    # A check that requires a layout may start it by itself, in a session on others.
    ran = any(case.outcome.executed and name not in needs.get(case.check, ()) for case in cases)
    if name in LAYOUTS and state is CapabilityState.CERTIFIED and not ran:
        state, reason = CapabilityState.UNCERTIFIED, "no layout with it was run"
    if name == Capability.CUDA and not cases:
        reason = "run with --device=cuda"
    certified = state is CapabilityState.CERTIFIED and name == Capability.BFLOAT16
    meaning = _meaning_of_bfloat16(cases) if certified else ""
    return CapabilityRecord(name=name, state=state, reason=reason, meaning=meaning)


def _meaning_of_bfloat16(cases: Sequence[CaseRecord]) -> str:
    """The accuracy that the passed ``cases`` have judged, and nothing beyond them."""
    passed = [case for case in cases if case.outcome is Outcome.PASSED]
    exact = [
        claim for check, claim in EXACT_IN_BFLOAT16.items() if any(case.check == check for case in passed)
    ]
    over_ranks = [case for case in passed if Capability.DATA_PARALLEL in case.capabilities]
    exact += ["such sums over ranks"] * any(case.check == "I20.bfloat16-sums" for case in over_ranks)
    return f"to the accuracy of float32: {', '.join(exact)}; all else {ROUNDED}" if exact else ROUNDED


def _state(cases: Sequence[CaseRecord], absent: Sequence[str]) -> tuple[CapabilityState, str]:
    for outcome, verb in ((Outcome.FAILED, "failed"), (Outcome.WAIVED, "is waived")):
        checks = sorted({case.check for case in cases if case.outcome is outcome})
        if checks:
            return CapabilityState.NOT_CERTIFIED, f"{', '.join(checks)} {verb}"
    missing = [case for case in cases if case.outcome is Outcome.NOT_RUN]
    if missing:
        return CapabilityState.UNCERTIFIED, f"{missing[0].check} was not run: {missing[0].reason}"
    if not any(case.outcome is Outcome.PASSED for case in cases):
        return CapabilityState.UNCERTIFIED, "no check of it was run"
    if absent:
        rest = f" and {len(absent) - 2} more were" if len(absent) > 2 else " was"
        return CapabilityState.UNCERTIFIED, f"{', '.join(absent[:2])}{rest} not selected"
    return CapabilityState.CERTIFIED, ""


def judge(results: Sequence[CaseRecord], problems: Sequence[str], *, complete: bool) -> Verdict:
    """The verdict on the engine that ``results`` and ``problems`` are about."""
    if any(case.outcome is Outcome.FAILED for case in results):
        return Verdict.FAILED
    if not any(case.outcome.executed for case in results):
        return Verdict.NOT_RUN
    if problems:
        return Verdict.FAILED
    return Verdict.PASSED if complete else Verdict.PARTIAL


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
