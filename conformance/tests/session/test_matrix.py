"""Cases that run for an engine: profiles, selections, capabilities, waivers; and the proof of a session."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from mutants import windows
from mutants.zoo import Mutant, mutants_of

from core_rl.config.capability import Capability
from core_rl.config.engine import DType
from core_rl.config.layout import ParallelLayout
from core_rl.errors import ConfigError
from core_rl.reference import ROLLOUT_SPEC, SPEC
from core_rl.registry.spec import EngineSpec
from core_rl_conformance.case import Case, Target
from core_rl_conformance.catalogue import CHECKS_DIRECTORY, Check, check, check_of, load_checks
from core_rl_conformance.outcomes import CaseRecord, Outcome
from core_rl_conformance.profile import DENSE, FAMILIES, MOE, Profile, Setting, Waiver, unlike
from core_rl_conformance.session.items import Plan
from core_rl_conformance.session.matrix import Selection, cases, quick_sample, select, three_rank_cases
from core_rl_conformance.session.summary import Summary

DP1, DP2, DP4 = (ParallelLayout(dp=degree) for degree in (1, 2, 4))
DENSE_ONLY = SPEC.capabilities - {Capability.MOE, Capability.ROUTING_REPLAY, Capability.VISION}
SPEC_DP = replace(SPEC, name="wide", capabilities=DENSE_ONLY | {Capability.DATA_PARALLEL})
AT_DP2 = Setting(layout=DP2)
HSDP = Setting(name="hsdp", layout=DP4, options={"options": {"replicas": 2}})
WIDE = Target(spec=SPEC_DP, profile=Profile(layouts=(DP1, DP2, DP4), families=("qwen3", "llama")))
NARROW = Target(spec=SPEC, profile=Profile())
HALVES = Target(
    spec=replace(SPEC_DP, capabilities=SPEC_DP.capabilities | {Capability.BFLOAT16}),
    profile=replace(WIDE.profile, dtypes=("float32", "bfloat16")),
)
CHECKS = load_checks()
WAIVER = Waiver(check="I7.logprobs", reason="a known bug", owner="somebody", raises=AssertionError)


# ------------------------------------------------------------------ catalogue


def test_every_module_has_documented_checks() -> None:
    modules = {path.stem for path in CHECKS_DIRECTORY.glob("*.py")} - {"__init__"}
    assert {entry.function.__module__.rpartition(".")[2] for entry in CHECKS.values()} == modules
    for identifier, entry in CHECKS.items():
        assert entry.identifier == identifier
        assert len(entry.title) > 20 and entry.where_to_look
        assert check_of(entry.function) is entry


EXPLAINED = "Nothing.\n\nWhy: x\nLook at: y"


@pytest.mark.parametrize(
    ("identifier", "text", "message"),
    [
        *(
            (name, EXPLAINED, "must look like")
            for name in ("logprobs", "I7", "I7.LogProbs", "7.x", "I7.log p")
        ),
        ("I7.other", "Nothing.\n\nWhy: x", "Look at:"),
    ],
)
def test_malformed_checks_are_refused(identifier: str, text: str, message: str) -> None:
    def nothing() -> None: ...

    nothing.__doc__ = text
    with pytest.raises(ValueError, match=message):
        check(identifier)(nothing)


# --------------------------------------------------------------------- matrix


def _places(selected: list[Case]) -> list[tuple[str, str]]:
    return [(str(case.layout), case.family) for case in selected]


def test_first_two_layouts_share_the_models() -> None:
    target = replace(WIDE, profile=replace(WIDE.profile, families=FAMILIES))
    for seed in range(len(FAMILIES)):
        selected = cases(CHECKS["I7.logprobs"], target, Selection(seed=seed))
        assert [str(case.layout) for case in selected] == ["dp1"] * 3 + ["dp2"] * 3 + ["dp4"]
        assert {case.family for case in selected[:6]} == set(FAMILIES)
        assert len({case.name for case in selected}) == len(selected)
    alone = cases(CHECKS["I7.logprobs"], target, Selection(layouts=("dp1",)))
    assert sorted(_places(alone)) == sorted(("dp1", family) for family in FAMILIES)


def test_three_data_parallel_ranks_are_added() -> None:
    calls, quick = CHECKS["I5.two-calls"], Selection(quick=True)
    (case,) = three_rank_cases(calls, WIDE, Selection())
    assert (str(case.layout), case.setting) == ("dp3", WIDE.three_ranks)
    without = [(CHECKS["I20.adamw"], WIDE, Selection()), (calls, NARROW, Selection()), (calls, WIDE, quick)]
    assert not [case for arguments in without for case in three_rank_cases(*arguments)]
    profile = replace(WIDE.profile, layouts=(DP1, ParallelLayout(dp=3)))
    assert replace(WIDE, profile=profile).three_ranks is None
    served = replace(WIDE.spec, kind="inference")
    assert replace(WIDE, spec=served).three_ranks is None
    select([WIDE], Selection(layouts=("dp3",)), CHECKS)


def test_checks_are_chosen_by_patterns_of_their_names() -> None:
    some = Selection(checks=("I1.*", "I20.adamw"))
    required = {name for name in CHECKS if some.wants(name)}
    assert {"I1.gradients", "I20.adamw"} <= required
    assert not {"I10.export", "I20.adamw-value-head"} & required
    assert some.narrowed and all(map(Selection().wants, CHECKS))


def test_models_rotate_on_early_settings() -> None:
    one_layout = replace(WIDE.profile, layouts=(DP1,), settings=(HSDP, replace(HSDP, name="other")))
    target = replace(WIDE, profile=one_layout)
    selected = cases(CHECKS["I7.logprobs"], target, Selection())
    assert [str(case.setting) for case in selected] == ["dp1", "dp1", "dp4-hsdp", "dp4-other"]
    assert [case.name for case in selected][-1].startswith("wide-dp4-other-")
    assert [str(case.other_setting) for case in selected] == ["dp4-hsdp", "dp4-hsdp", "dp4-other", "dp1"]
    (selection,) = cases(CHECKS["I4.clipping"], target, Selection(layouts=("dp4-hsdp",)))
    assert (selection.setting, selection.layout) == (HSDP, DP4)


def test_a_layout_may_take_some_models_only() -> None:
    narrow = Setting(layout=DP4, families=("llama",))
    target = replace(WIDE, profile=replace(WIDE.profile, layouts=(DP1, DP2), settings=(narrow,)))
    selected = [case for one in CHECKS.values() for case in cases(one, target, Selection(layouts=("dp4",)))]
    assert {case.family for case in selected if not (case.not_run or case.not_supported)} == {"llama"}
    (moving,) = cases(CHECKS["I11.other-layout"], target, Selection(layouts=("dp1",), families=("qwen3",)))
    assert moving.other_setting == AT_DP2
    (tied,) = (case for case in selected if case.check.identifier == "I10.tied-after-steps")
    assert "takes a model that this can use" in tied.not_run


def test_setting_options_override_profile_options() -> None:
    common = {"options": {"replicas": 1, "compile": {"mode": "default"}}, "seed": 3}
    assert HSDP.over(common) == {"options": {"replicas": 2, "compile": {"mode": "default"}}, "seed": 3}
    assert common["options"] == {"replicas": 1, "compile": {"mode": "default"}}


def test_checks_of_state_alternate_layouts() -> None:
    by_seed = [_places(cases(CHECKS["I4.clipping"], WIDE, Selection(seed=seed))) for seed in range(4)]
    assert [{layout for layout, _ in places} for places in by_seed[:2]] in (
        [{"dp1", "dp2"}, {"dp2", "dp4"}],
        [{"dp2", "dp4"}, {"dp1", "dp2"}],
    )
    assert {family for places in by_seed for _, family in places} == {"qwen3", "llama"}


@pytest.mark.parametrize("name", ["I7.logprobs", "I4.clipping"])
@pytest.mark.parametrize("seed", range(3))
def test_checks_take_turns_on_further_layouts(name: str, seed: int) -> None:
    settings = tuple(Setting(name=str(number), layout=DP4) for number in range(6))
    target = replace(WIDE, profile=replace(WIDE.profile, layouts=(DP1, DP2, DP4), settings=settings))
    selection = Selection(seed=seed, sample_every=3)
    selected = [str(case.setting) for case in cases(CHECKS[name], target, selection)]
    assert "dp2" in selected
    assert 3 <= len(set(selected)) == len(selected) <= 4
    assert selection.narrowed


def test_quick_session_uses_second_layout() -> None:
    selected = [case for one in CHECKS.values() for case in cases(one, WIDE, Selection(quick=True))]
    run = [case for case in selected if not (case.not_run or case.not_supported)]
    assert {str(case.layout) for case in run if case.check.each != "engine"} == {"dp2"}
    assert {case.family for case in run} == {"qwen3", "llama"}
    checks = {one.identifier for one in CHECKS.values() if one.kind == "train" and one.partner is None}
    checks -= {one.identifier for one in CHECKS.values() if one.min_cp > 1 or not one.quick}
    left_out = {case.check.identifier for case in selected if case.not_run or case.not_supported}
    assert {case.check.identifier for case in selected} - left_out == {
        name for name in checks if CHECKS[name].requires <= SPEC_DP.capabilities
    }


@pytest.mark.parametrize(
    ("families", "models"),
    [
        (FAMILIES, ["qwen3", "gemma2", MOE]),
        (DENSE, ["qwen3", "gemma2", "llama"]),
        (("qwen2", "gpt2", MOE), ["qwen2", MOE]),
        (("gemma2", "qwen3"), ["gemma2"]),
        (("llama",), ["llama"]),
        ((), []),
    ],
)
def test_quick_models_differ_in_kind(families: tuple[str, ...], models: list[str]) -> None:
    assert unlike(families) == models
    target = replace(WIDE, profile=replace(WIDE.profile, families=families))
    for name, without in (("I7.logprobs", ()), ("I4.clipping", (MOE,))) if families else ():
        by_seed = [cases(CHECKS[name], target, Selection(quick=True, seed=seed)) for seed in range(6)]
        assert [len(selected) for selected in by_seed] == [1] * 6
        expected = unlike([family for family in families if family not in without])
        assert {case.family for selected in by_seed for case in selected} == set(expected)


def test_quick_servers_have_two_models() -> None:
    served = replace(
        WIDE, spec=ROLLOUT_SPEC, profile=replace(WIDE.profile, layouts=(DP1,), families=FAMILIES)
    )
    for seed, second in enumerate(("gemma2", MOE)):
        selection = Selection(quick=True, seed=seed)
        selected = [case for one in CHECKS.values() for case in cases(one, served, selection)]
        run = {case.family for case in selected if not (case.not_run or case.not_supported)}
        assert run == {"qwen3", second}


@pytest.mark.parametrize("mutant", list(mutants_of(windows)), ids=lambda mutant: mutant.name)
def test_quick_sessions_judge_what_qwen3_lacks(mutant: Mutant) -> None:
    target = replace(NARROW, profile=Profile(families=FAMILIES))
    selected = cases(CHECKS[mutant.killed_by], target, Selection(quick=True))
    assert mutant.family in [case.family for case in selected]


def test_further_dtypes_are_run_with_fewer_models() -> None:
    selected = cases(CHECKS["I7.logprobs"], HALVES, Selection())
    halves = [case for case in selected if case.dtype == "bfloat16"]
    assert len(selected) - len(halves) == 3
    assert [str(case.layout) for case in halves] == ["dp2"]
    assert all(Capability.BFLOAT16 in case.capabilities for case in halves)


def test_single_dtype_checks_keep_their_dtype() -> None:
    target, half, full = HALVES, CHECKS["I20.bfloat16-steps"], CHECKS["I9.dropout-masks"]
    for selection in (Selection(), Selection(quick=True)):
        assert {case.dtype for case in cases(half, target, selection)} == {"bfloat16"}
        assert {case.dtype for case in cases(full, target, selection)} == {"float32"}
    assert cases(half, target, Selection(dtype="float32")) == []


@pytest.mark.parametrize(
    ("name", "target", "selection", "reason"),
    [
        ("I2.data-parallel", NARROW, Selection(), "undeclared: data_parallel"),
        ("I2.data-parallel", WIDE, Selection(layouts=("dp1",)), "dp >= 2"),
        ("I10.tied-after-steps", WIDE, Selection(families=("llama",)), "qwen3, gpt2, gemma2"),
        ("I20.bfloat16-steps", WIDE, Selection(), "undeclared: bfloat16"),
        ("I20.bfloat16-steps", replace(HALVES, profile=WIDE.profile), Selection(), "has no dtype bfloat16"),
    ],
)
def test_left_out_checks_have_a_reason(name: str, target: Target, selection: Selection, reason: str) -> None:
    (selected,) = cases(CHECKS[name], target, selection)
    assert reason in selected.not_supported + selected.not_run


def test_tied_checks_need_tied_model() -> None:
    (selected,) = cases(CHECKS["I10.tied-after-steps"], WIDE, Selection(layouts=("dp2",)))
    assert (selected.family, selected.not_run) == ("qwen3", "")


def test_cases_certify_capabilities_of_their_layout_and_check() -> None:
    selected = cases(CHECKS["I11.resume"], WIDE, Selection(layouts=("dp2",), families=("llama",)))
    assert selected[0].capabilities == {Capability.SHARDED_CHECKPOINT, Capability.DATA_PARALLEL}


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(layouts=("dp8",)), "--layout=dp8: the profiles have dp1, dp2, dp3, dp4"),
        (Selection(families=("gpt5",)), "--model=gpt5: the profiles have llama, qwen3"),
        (Selection(dtype="bfloat16"), "--dtype=bfloat16: the profiles have float32"),
    ],
)
def test_unknown_selections_are_refused(selection: Selection, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select([WIDE], selection, CHECKS)


# -------------------------------------------------------------------- profile


def test_experts_need_declared_capability() -> None:
    profile, declared = Profile(families=("llama",)), replace(SPEC, capabilities=frozenset({Capability.MOE}))
    undeclared = replace(SPEC, capabilities=frozenset())
    assert profile.completed(undeclared) == profile
    (problem,) = Profile(families=("llama", MOE)).violations(undeclared, CHECKS)
    assert "model 'qwen3_moe' needs the capability 'moe'" in problem
    completed = profile.completed(declared)
    assert completed.families == ("llama", MOE)
    selected = cases(CHECKS["I7.logprobs"], Target(spec=declared, profile=completed), Selection())
    assert [(case.family, Capability.MOE in case.capabilities) for case in selected] == [
        ("llama", False),
        (MOE, True),
    ]


SAVING = Setting(name="saving", layout=DP1, options={"seed": 1})
WRONG_PROFILES = {
    "'layouts' is empty": Profile(layouts=()),
    "layout dp2 needs .*data_parallel": Profile(layouts=(DP1, DP2)),
    "unknown model family 'gpt5'": Profile(families=("gpt5",)),
    "dtype bfloat16 needs": Profile(dtypes=("bfloat16",)),
    "names no check of this suite": Profile(waivers=(replace(WAIVER, check="I7.nothing"),)),
    "has no reason": Profile(waivers=(replace(WAIVER, reason=" "),)),
    "has no owner": Profile(waivers=(replace(WAIVER, owner=""),)),
    "'raises' is 'AssertionError'": Profile(waivers=(replace(WAIVER, raises="AssertionError"),)),  # type: ignore[arg-type]
    "names the layout dp4": Profile(waivers=(replace(WAIVER, layouts=(DP4,)),)),
    "layout dp4-hsdp needs .*data_parallel": Profile(settings=(HSDP,)),
    "use small letters": Profile(settings=(replace(SAVING, name="Saves memory"),)),
    "'dp1-saving': give it both a name and options": Profile(settings=(replace(SAVING, options={}),)),
    "'dp1-saving' takes the family 'gpt2', which": Profile(
        families=("llama",), settings=(replace(SAVING, families=("llama", "gpt2")),)
    ),
    "'dp1-saving' takes no model": Profile(settings=(replace(SAVING, families=()),)),
    "the profile: its options set 'dtype'": Profile(options={"dtype": "bfloat16"}),
    "'dp1-saving': its options set 'layout'": Profile(settings=(replace(SAVING, options={"layout": {}}),)),
    "'dp1-saving' is named twice": Profile(settings=(SAVING, replace(SAVING, options={"seed": 2}))),
    "names the family 'qwen2'": Profile(families=("llama",), waivers=(replace(WAIVER, families=("qwen2",)),)),
    "names the dtype 'bfloat16'": Profile(waivers=(replace(WAIVER, dtypes=("bfloat16",)),)),
}


@pytest.mark.parametrize("message", WRONG_PROFILES)
def test_wrong_profiles_are_explained(message: str) -> None:
    problems = list(WRONG_PROFILES[message].violations(SPEC, CHECKS))
    assert len(problems) == 1
    assert re.search(message, problems[0])


def test_options_without_a_name_are_refused() -> None:
    (problems,) = replace(SAVING, name="").violations(("llama",))
    assert "'dp1': give it both a name and options, or neither" in problems


def test_a_right_profile_has_no_violations() -> None:
    assert not list(replace(WIDE.profile, waivers=(WAIVER,)).violations(SPEC_DP, CHECKS))


@pytest.mark.parametrize(
    ("changes", "place", "covered"),
    [
        ({"layouts": (DP2,), "families": ("llama",)}, ("I7.logprobs", AT_DP2, "llama", "bfloat16"), True),
        ({"layouts": (DP2,)}, ("I7.logprobs", Setting(layout=DP1), "llama", "float32"), False),
        ({"families": ("llama",)}, ("I7.logprobs", AT_DP2, "qwen3", "float32"), False),
        ({}, ("I7.entropy", AT_DP2, "llama", "float32"), False),
        ({"layouts": ("dp4-hsdp",)}, ("I7.logprobs", HSDP, "llama", "float32"), True),
        ({"layouts": ("dp4-hsdp",)}, ("I7.logprobs", Setting(layout=DP4), "llama", "float32"), False),
        ({"dtypes": ("float32",)}, ("I7.logprobs", AT_DP2, "llama", "float32"), True),
        ({"dtypes": ("float32",)}, ("I7.logprobs", AT_DP2, "llama", "bfloat16"), False),
    ],
)
def test_waivers_cover_named_places(
    changes: dict[str, Any], place: tuple[str, Setting, str, DType], covered: bool
) -> None:
    assert replace(WAIVER, **changes).covers(*place) is covered


# -------------------------------------------------------------------- summary


def _result(check: Check, outcome: Outcome = Outcome.PASSED, **fields: object) -> CaseRecord:
    values: dict[str, object] = {
        "check": check.identifier,
        "engine": SPEC_DP.name,
        "layout": "dp2",
        "model": "llama",
        "dtype": "float32",
        "seed": 0,
        "outcome": outcome,
        "seconds": 0.5,
        "capabilities": tuple(sorted(check.requires | {Capability.DATA_PARALLEL})),
    }
    return CaseRecord(**{**values, **fields})


def _summary(narrowed: bool = False, spec: EngineSpec = SPEC_DP) -> Summary:
    return Summary(Plan([Target(spec=spec, profile=WIDE.profile)], Selection()), narrowed)


@pytest.mark.parametrize("beyond", [set(), {Capability.LORA}])  # no check of this session can show LoRA
def test_complete_session_has_no_problem(beyond: set[Capability]) -> None:
    summary = _summary(spec=replace(SPEC_DP, capabilities=SPEC_DP.capabilities | beyond))
    for entry in CHECKS.values():
        summary.add(_result(entry))
    assert summary.problems() == {"wide": []}


def test_empty_session_is_no_success() -> None:
    summary = _summary(narrowed=True)
    summary.add(_result(CHECKS["I7.logits"], Outcome.NOT_SUPPORTED))
    assert "no check was executed" in summary.problems()["wide"][0]


def test_unproven_capability_is_a_problem() -> None:
    summary, narrowed = _summary(), _summary(narrowed=True)
    for entry in CHECKS.values():
        outcome = Outcome.NOT_RUN if Capability.SYNC_DISK in entry.requires else Outcome.PASSED
        summary.add(_result(entry, outcome))
        narrowed.add(_result(entry, outcome))
    assert ["sync_disk" in problem for problem in summary.problems()["wide"]] == [True]
    assert narrowed.problems() == {"wide": []}


@pytest.mark.parametrize("installed", [False, True])
def test_eight_bit_moments_need_their_package(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, an engine that passes everything else passes; with it, the capability must be shown."""
    found_spec = object() if installed else None
    monkeypatch.setattr("core_rl_conformance.session.summary.find_spec", lambda package: found_spec)
    summary = _summary(spec=replace(SPEC_DP, capabilities=SPEC_DP.capabilities | {Capability.ADAMW_8BIT}))
    for entry in CHECKS.values():
        outcome = Outcome.NOT_RUN if Capability.ADAMW_8BIT in entry.requires else Outcome.PASSED
        summary.add(_result(entry, outcome))
    assert ["adamw_8bit" in problem for problem in summary.problems()["wide"]] == [True] * installed


def test_a_failure_is_not_overwritten() -> None:
    summary = _summary()
    for outcome in (Outcome.PASSED, Outcome.FAILED, Outcome.PASSED):
        summary.add(_result(CHECKS["I7.logprobs"], outcome))
    assert [result.outcome for result in summary.results] == [Outcome.FAILED]


def test_results_with_several_partners_coexist() -> None:
    summary, pair = _summary(), next(entry for entry in CHECKS.values() if entry.partner)
    outcomes = {"first": Outcome.PASSED, "second": Outcome.FAILED, "third": Outcome.PASSED}
    for partner, outcome in outcomes.items():
        summary.add(_result(pair, outcome, partner=partner))
    assert {result.partner: result.outcome for result in summary.results} == outcomes


def test_quick_sample_spreads_checks_over_engines() -> None:
    selection = Selection(quick=True, sample_every=3)
    served = replace(WIDE, spec=replace(SPEC_DP, name="served", kind="inference"))
    engines = [replace(WIDE, spec=replace(SPEC_DP, name=name)) for name in ("first", "second", "third")]
    # An engine of another kind takes no turn of theirs.
    targets = [engines[0], served, *engines[1:]]
    quick = [
        case for one in CHECKS.values() for case in cases(one, engines[0], selection) if not case.not_run
    ]
    samples = [
        [quick_sample(replace(case, target=engine), targets, selection) for case in quick]
        for engine in engines
    ]
    run = [[case for case in sample if not case.not_run] for sample in samples]
    assert min(len(sample) for sample in run) > len(quick) / 5
    assert sorted(case.check.identifier for sample in run for case in sample) == sorted(
        case.check.identifier for case in quick
    )
