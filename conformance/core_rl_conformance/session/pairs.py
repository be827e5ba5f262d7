"""The cases of checks that compare two engines: pairs, layouts and models.

Each engine of a pair is the one under check once, and the partner once: where they differ, the side that
is off the oracle fails, and the other one says whose fault it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core_rl.config.engine import DType
from core_rl_conformance.catalogue import Check
from core_rl_conformance.profile import Setting
from core_rl_conformance.session.matrix import Case, Selection, Target, places_of

__all__ = ["pair_cases"]


def pair_cases(check: Check, targets: Sequence[Target], selection: Selection) -> Iterator[Case]:
    """The cases of a check that needs a partner; none without two engines of the right kinds."""
    for target in targets:
        for partner in targets:
            suited = check.kind == target.spec.kind and check.partner == partner.spec.kind
            if suited and target is not partner:
                yield from _cases(check, target, partner, selection)


def _cases(check: Check, target: Target, partner: Target, selection: Selection) -> Iterator[Case]:
    settings, families, dtypes = selection.of(target.profile)
    if not (settings and families and dtypes):
        return
    others, other_families, other_dtypes = selection.of(partner.profile)
    # A layout that only the first engine has selects nothing of the second.
    others = others or list(partner.profile.places)
    shared = [family for family in families if family in other_families]
    suited = [family for family in shared if check.families is None or family in check.families]
    common = [dtype for dtype in dtypes if dtype in other_dtypes]
    settings = [setting for setting in settings if setting.suited(suited)] or settings[:1]
    not_supported, not_run = _undeclared(check, target, partner), _missing(suited, common)
    places: list[tuple[Setting, str, DType]] = [(settings[0], families[0], dtypes[0])]
    if not (not_supported or not_run):
        places = list(places_of(check, settings, suited, common, selection))
    for setting, family, dtype in places:
        # Partners' layouts take turns, among those that can take the model.
        takes = [other for other in others if other.suited([family])] or others
        yield Case(
            check=check,
            target=target,
            setting=setting,
            family=family,
            dtype=dtype,
            seed=selection.seed,
            device=selection.device,
            partner=partner,
            partner_setting=takes[settings.index(setting) % len(takes)],
            not_supported=not_supported,
            not_run=not_run,
        )


def _undeclared(check: Check, target: Target, partner: Target) -> str:
    own = sorted(check.requires - target.spec.capabilities)
    others = sorted(check.partner_requires - partner.spec.capabilities)
    parts = [f"undeclared: {', '.join(own)}"] if own else []
    parts += [f"undeclared by {partner.spec.name}: {', '.join(others)}"] if others else []
    return "; ".join(parts)


def _missing(families: Sequence[str], dtypes: Sequence[DType]) -> str:
    if not families:
        return "the two profiles share no model that it can use"
    return "" if dtypes else "the two profiles share no dtype"
