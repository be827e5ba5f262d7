"""The cases of a session: every check, for every engine, on the layouts and models of the engine's profile."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import permutations

from core_rl.config.base import parse_config
from core_rl.config.capability import Capability
from core_rl.config.engine import DType
from core_rl.engine.loading import load_backend
from core_rl.errors import ConfigError, raise_all
from core_rl.registry.engines import get_spec, load_config
from core_rl.registry.objects import load_object
from core_rl_conformance.case import Case, Target, takes
from core_rl_conformance.catalogue import Check
from core_rl_conformance.profile import BUILT, MIXTURES, Profile, Setting, unlike

Place = tuple[Setting, str, DType]
FULL = 2
"""Number of layouts of a profile that share its models in each check: one and several ranks differ most."""
OF_STATE = 2
"""Checks that are independent of the model run on the second layout, and on one of so many others."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The command line's selection; None is everything that the profile names."""

    layouts: tuple[str, ...] | None = None
    """Full names of layouts and settings, as ``dp2`` and ``dp4-hsdp``."""
    families: tuple[str, ...] | None = None
    checks: tuple[str, ...] | None = None
    """Patterns of identifiers, as ``I1.*``."""
    dtype: DType | None = None
    seed: int = 0
    quick: bool = False
    sample_every: int = 1
    """Above 1, each check is run on the second layout, on one of so many of the others, and with that part of the
    models."""
    device: str = "cpu"
    soak_minutes: float | None = None
    """Time of a soak, which replaces the checks; None runs the checks."""
    still_steps: int = 0
    """Steps at learning rate 0, besides the checks."""

    @property
    def narrowed(self) -> bool:
        """True if it leaves something out that the profile names."""
        parts = (self.layouts, self.families, self.checks, self.dtype, self.soak_minutes)
        return self.quick or self.sample_every > 1 or any(part is not None for part in parts)

    def wants(self, identifier: str) -> bool:
        """Whether the check ``identifier`` is selected."""
        return self.checks is None or any(fnmatchcase(identifier, pattern) for pattern in self.checks)

    def wants_layout(self, setting: Setting) -> bool:
        """Whether the layout or setting is selected."""
        return self.layouts is None or str(setting) in self.layouts

    def of(self, profile: Profile) -> tuple[list[Setting], list[str], list[DType]]:
        """The layouts and settings, models and dtypes of ``profile`` that are selected."""
        places = [place for place in profile.places if self.wants_layout(place)]
        families = [f for f in profile.families if self.families is None or f in self.families]
        dtypes = self.dtypes_of(profile)
        # The smallest layout and the smallest with several ranks show most bugs.
        return (places[:2], families, dtypes[:1]) if self.quick else (places, families, dtypes)

    def dtypes_of(self, profile: Profile, only: DType | None = None) -> list[DType]:
        """The selected dtypes of ``profile``, or only the dtype that a check can use."""
        selected = [d for d in profile.dtypes if self.dtype is None or d == self.dtype]
        return selected if only is None else [d for d in selected if d == only]


def load_target(name: str, known_checks: Collection[str]) -> Target:
    """The engine ``name`` and its profile; without one, the suite runs the default profile.

    Raises `EngineError` for an engine that cannot be used, and `ConfigError` that lists everything
    that is wrong with its profile.
    """
    spec = get_spec(name)
    profile = (
        load_object(spec.conformance, f"engine {name!r}: its profile") if spec.conformance else Profile()
    )
    if not isinstance(profile, Profile):
        raise ConfigError(
            f"engine {name!r}: {spec.conformance!r} is a {type(profile).__name__}, not a Profile"
        )
    profile = profile.completed(spec)
    raise_all(
        ConfigError, f"the conformance profile of engine {name!r}", profile.violations(spec, known_checks)
    )
    # An engine that cannot be imported fails once here, and not in every check.
    load_backend(spec)
    # Its config reads the options of each layout and setting, before hundreds of checks do.
    for place in profile.places:
        values = {**place.over(profile.options), "model": {"path": "."}, "layout": place.layout}
        parse_config(load_config(spec), values, f"the conformance profile of engine {name!r}, layout {place}")
    return Target(spec=spec, profile=profile)


def select(targets: Sequence[Target], selection: Selection, known_checks: Collection[str]) -> None:
    """Raise `ConfigError` for a selection that is empty or unknown for every engine."""
    layouts = {str(place) for target in targets for place in target.places}
    families = {family for target in targets for family in target.profile.families}
    dtypes = {dtype for target in targets for dtype in target.profile.dtypes}
    problems = [
        f"--layout={name}: the profiles have {_listed(layouts)}"
        for name in selection.layouts or ()
        if name not in layouts
    ]
    problems += [
        f"--model={name}: the profiles have {_listed(families)}; the suite builds {', '.join(BUILT)}"
        for name in selection.families or ()
        if name not in families
    ]
    problems += [
        f"--check={pattern}: no check is called so; `core-rl checks` lists them"
        for pattern in selection.checks or ()
        if not any(fnmatchcase(identifier, pattern) for identifier in known_checks)
    ]
    if selection.dtype is not None and selection.dtype not in dtypes:
        problems.append(f"--dtype={selection.dtype}: the profiles have {_listed(dtypes)}")
    raise_all(ConfigError, "nothing to check", problems)


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def cases(check: Check, target: Target, selection: Selection) -> list[Case]:
    """The cases of one check for one engine; an unsupported check gives a single case with the reason."""
    profile = target.profile
    settings, families, dtypes = selection.of(profile)
    not_supported = _not_supported(check, target, selection)
    if check.dtype is not None and not not_supported:
        dtypes = selection.dtypes_of(profile, check.dtype)
    if check.kind != target.kind or check.partner is not None or not (settings and families and dtypes):
        return []
    suited = [family for family in families if takes(check, family)]
    wide = [
        setting
        for setting in settings
        if setting.layout.dp >= check.min_dp and setting.layout.cp >= check.min_cp
        if setting.suited(suited) or not suited
    ]
    not_run = _not_run(check, target, wide, suited, selection)
    # A user's layouts are all meant.
    spread = replace(check, each="layout and model") if target.given else check
    first, places = (settings[0], families[0], dtypes[0]), places_of(spread, wide, suited, dtypes, selection)
    selected = []
    for case in _at(check, target, selection, first, places, not_supported, not_run):
        second = _other(case.setting, case.family, settings, profile)
        alone = not (case.not_run or second or check.min_layouts < 2)
        reason = f"no other layout takes {case.family}" if alone else case.not_run
        selected.append(replace(case, other_setting=second, not_run=reason))
    return selected


def three_rank_cases(check: Check, target: Target, selection: Selection) -> Iterator[Case]:
    """The case of one check on the three data-parallel ranks that the suite adds; none for a check without them."""
    _, families, dtypes = selection.of(target.profile)
    suited = [family for family in families if takes(check, family)]
    setting = target.three_ranks
    asked = check.on_three_ranks and check.kind == target.kind
    if setting is None or not (asked and suited and dtypes) or selection.quick:
        return
    if selection.wants_layout(setting) and not _not_supported(check, target, selection):
        family = suited[_turn(check, selection) % len(suited)]
        place = (setting, family, dtypes[0] if check.dtype is None else check.dtype)
        yield from _at(check, target, selection, place, [place], "", "")


def quick_sample(case: Case, targets: Sequence[Target], selection: Selection) -> Case:
    """``case``, not run in a quick session of ``targets`` unless it is its turn in the sample.

    Every engine runs an N-th of the checks, and the next engine of its kind other checks.
    """
    number = [target for target in targets if target.kind == case.target.kind].index(case.target)
    if (
        selection.quick
        and not case.not_run
        and (_turn(case.check, selection) + number) % selection.sample_every
    ):
        return replace(case, not_run="--sample-every leaves it out")
    return case


def _at(
    check: Check,
    target: Target,
    selection: Selection,
    first: Place,
    places: Iterable[Place],
    not_supported: str,
    not_run: str,
) -> Iterator[Case]:
    """The cases of a check at ``places``, or at the ``first`` one alone with the reason why it does not run."""
    for setting, family, dtype in [first] if not_supported or not_run else places:
        yield Case(
            check=check,
            target=target,
            setting=setting,
            family=family,
            dtype=dtype,
            seed=selection.seed,
            device=selection.device,
            not_supported=not_supported,
            not_run=not_run,
        )


def _other(setting: Setting, family: str, selected: Sequence[Setting], profile: Profile) -> Setting | None:
    """The setting after ``setting`` among the selected, or else among all, that can take ``family``."""
    for settings in (selected, profile.places):
        suited = [one for one in settings if one == setting or one.suited([family])]
        following = suited[(suited.index(setting) + 1) % len(suited)]
        if following != setting:
            return following
    return None


def _not_supported(check: Check, target: Target, selection: Selection) -> str:
    if check.identifier in target.missing_routes:
        return target.missing_routes[check.identifier]
    most = max(layout.dp for layout in target.profile.layouts)
    if target.trainer is not None and most < check.min_dp:
        return f"the trainer's profile has no layout with {check.min_dp} ranks"
    required = check.requires | ({Capability.CUDA} if selection.device == "cuda" else set())
    missing = sorted(required - target.spec.capabilities - target.withheld.keys())
    routes = dict.fromkeys(target.missing_routes[name] for name in missing if name in target.missing_routes)
    if routes:
        return "; ".join(routes)
    if not missing and check.dtype is not None and check.dtype not in target.profile.dtypes:
        return f"the profile has no dtype {check.dtype}"
    return f"undeclared: {', '.join(missing)}" if missing else ""


def _not_run(
    check: Check, target: Target, settings: Sequence[Setting], families: Sequence[str], selection: Selection
) -> str:
    withheld = (target.withheld.get(name) for name in (check.identifier, *sorted(check.requires)))
    if reason := next(filter(None, withheld), ""):
        return reason
    if selection.quick and not check.quick:
        return "--quick leaves it out"
    if len(target.profile.places) < check.min_layouts:
        return f"the profile has {len(target.profile.places)} layout; this needs {check.min_layouts}"
    if not settings:
        wide = f"dp >= {check.min_dp} and cp >= {check.min_cp}"
        return f"no selected layout has {wide}, or takes a model that this can use"
    return "" if families else f"it needs a model of {', '.join(check.families or ())}"


def places_of(
    check: Check,
    settings: Sequence[Setting],
    families: Sequence[str],
    dtypes: Sequence[DType],
    selection: Selection,
) -> Iterator[Place]:
    """Settings, models and dtypes of ``check``: the first two layouts share the models, others run one.

    Models rotate over settings too. Further dtypes are run on the second layout, where ranks share state. Checks that
    are independent of the model run there, and on every second of the other layouts. With ``selection.sample_every``
    all checks run on every N-th layout, and on the second one, with fewer models. A quick session is the second layout.
    """
    if check.each == "engine":
        yield settings[0], settings[0].suited(families)[0], dtypes[0]
        return
    if selection.quick:
        yield _quick_place(check, settings[-1], families, dtypes[0], selection)
        return
    first, second = _turn(check, selection), min(1, len(settings) - 1)
    every = max(selection.sample_every, OF_STATE if check.each == "layout" else 1)
    share = math.ceil(len(families) / max(1, sum(not setting.name for setting in settings[:FULL])))
    for number, dtype in enumerate(dtypes):
        for place, setting in enumerate(settings):
            if place != second and (number > 0 or (first + place - (place > second)) % every):
                continue
            several = check.each == "layout and model" and number == 0 and not setting.name and place < FULL
            count = math.ceil(share / selection.sample_every) if several else 1
            suited = setting.suited(families)
            turn = (first + number + place * (share if several else 1)) % len(suited)
            yield from ((setting, family, dtype) for family in (suited[turn:] + suited[:turn])[:count])


def _quick_place(
    check: Check, setting: Setting, families: Sequence[str], dtype: DType, selection: Selection
) -> Place:
    """The next of few unlike models; experts, which take twice as long, for checks of models alone.

    A server takes long to start with another model: checks of inference engines share a second model.
    """
    suited = setting.suited(families)
    dense = [family for family in suited if family not in MIXTURES]
    serves = "inference" in (check.kind, check.partner)
    models = unlike(suited if serves or check.each == "layout and model" else dense or suited)
    if serves and len(models) > 1:
        models = [models[0], models[1 + selection.seed % (len(models) - 1)]]
    return setting, models[_turn(check, selection) % len(models)], dtype


def _turn(check: Check, selection: Selection) -> int:
    """The number of the model that ``check`` begins with.

    A session sees all of them even on a single layout, and each check begins at another one with another seed.
    """
    return sum(map(ord, check.identifier)) + selection.seed


def pair_cases(check: Check, targets: Sequence[Target], selection: Selection) -> Iterator[Case]:
    """Cases of a check that needs a partner; none without two engines of the right kinds.

    Each engine is the one under check once, and the partner once: where they differ, the engine that is off the oracle
    fails, and the message of the second one names the first.
    """
    for target, partner in permutations(targets, 2):
        if check.kind == target.kind and check.partner == partner.kind:
            yield from _cases_of_pair(check, target, partner, selection)


def _cases_of_pair(check: Check, target: Target, partner: Target, selection: Selection) -> Iterator[Case]:
    settings, families, dtypes = selection.of(target.profile)
    if not (settings and families and dtypes):
        return
    partner_settings, other_families, other_dtypes = selection.of(partner.profile)
    # A layout that only the first engine has selects nothing of the second.
    partner_settings = partner_settings or list(partner.profile.places)
    shared = [family for family in families if family in other_families]
    suited = [family for family in shared if takes(check, family)]
    common = [dtype for dtype in dtypes if dtype in other_dtypes]
    settings = [setting for setting in settings if setting.suited(suited)] or settings[:1]
    missing = sorted(check.partner_requires - partner.spec.capabilities)
    reasons = [
        _not_supported(check, target, selection),
        f"undeclared by {partner.spec.name}: {', '.join(missing)}" if missing else "",
    ]
    lacks = "" if suited and common else "dtype" if suited else "model that it can use"
    not_run = f"the two profiles share no {lacks}" if lacks else ""
    first = settings[0], families[0], dtypes[0]
    places = places_of(check, settings, suited, common, selection)
    for case in _at(check, target, selection, first, places, "; ".join(filter(None, reasons)), not_run):
        # Partners' layouts rotate, among layouts that can take the model.
        able = [other for other in partner_settings if other.suited([case.family])] or partner_settings
        partner_setting = able[settings.index(case.setting) % len(able)]
        yield replace(case, partner=partner, partner_setting=partner_setting)
