"""The conformance profile of an engine: its layouts, models, dtypes and known failures.

Light: the module that a spec's ``conformance`` names needs nothing but this to be imported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from core_rl.config.capability import Capability
from core_rl.config.engine import DType
from core_rl.config.layout import ParallelLayout
from core_rl.registry.spec import EngineSpec

__all__ = [
    "BUILT",
    "DENSE",
    "FAMILIES",
    "HYBRID",
    "HYBRID_MOE",
    "MIXTURES",
    "MOE",
    "NAMED_APART",
    "ROUTED",
    "VISION",
    "VISION_MOE",
    "Profile",
    "Setting",
    "Waiver",
]

DENSE = ("qwen3", "llama", "qwen2", "gpt2", "gemma2")
NAMED_APART = ("qwen3", "llama", "qwen2", "gemma2")
"""Families with a layer for each projection: servers take adapters of no others."""
MOE = "qwen3_moe"
FAMILIES = (*DENSE, MOE)
"""Families of attention, dense and with experts."""
HYBRID = "qwen3_5_text"
"""Gated DeltaNet in some layers."""
HYBRID_MOE = "qwen3_next"
"""Gated DeltaNet in some layers, and experts, of which all tokens share one."""
VISION_MOE = "qwen3_vl_moe"
"""Images, and experts in the text."""
VISION = ("qwen3_vl", "qwen2_5_vl", "qwen3_5_vl", "gemma3_vl", "internvl", VISION_MOE)
"""Vision-language models, whose sequences have images."""
ROUTED = (MOE, VISION_MOE)
"""Families for checks of routers: their balance, and choices that are recorded and replayed."""
MIXTURES = (*ROUTED, HYBRID_MOE)
"""Families with experts."""
BUILT = (*FAMILIES, HYBRID, HYBRID_MOE, *VISION)
"""The tiny models that a profile can name."""
UNLIKE = (("gemma2",), (MOE, HYBRID_MOE, "llama", "qwen2"))
"""Models that differ from Qwen3 in what it lacks: a window with soft caps; an untied head, best with experts."""
SET_BY_THE_SUITE = ("device", "dtype", "layout", "model", "optimizer")
"""Fields of a config that checks fill in: options for them would be lost silently."""
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A layout with options of the engine that change how it computes there, or that takes some models only.

    With options, such as hybrid sharding, it is run as a layout of its own, and named after both:
    ``dp4-hsdp``.
    """

    name: str = ""
    """Short, such as ``hsdp``; empty for a layout without options of its own."""
    layout: ParallelLayout
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of the engine's config as in `Profile.options`, which they are laid over, section by section."""
    families: tuple[str, ...] | None = None
    """The tiny models of the profile that it can take; None is all."""
    layer_multiple: int = 1
    """Tiny models get as many layers here as it takes for this to divide them: the stages of a pipeline."""
    expert_multiple: int = 1
    """The same for experts."""

    def __str__(self) -> str:
        return f"{self.layout}-{self.name}" if self.name else str(self.layout)

    def over(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The profile's ``options``, overridden by this setting's."""
        return laid_over(options, self.options)

    def suited(self, families: Sequence[str]) -> list[str]:
        """The part of ``families`` that it can take."""
        return [family for family in families if self.families is None or family in self.families]

    def violations(self, families: Collection[str]) -> Iterator[str]:
        """Problems of this setting in a profile of these ``families``, for any engine."""
        where = f"the setting {str(self)!r}"
        if self.name and not NAME.fullmatch(self.name):
            yield f"{where}: its name is {self.name!r}; use small letters, digits and single hyphens, as in 'hsdp'"
        if bool(self.name) != bool(self.options):
            yield f"{where}: give it both a name and options, or neither"
        for family in sorted(set(self.families or ()) - set(families)):
            yield f"{where} takes the family {family!r}, which is not in 'families'"
        for field_name in ("layer_multiple", "expert_multiple"):
            if getattr(self, field_name) < 1:
                yield f"{where}: {field_name} is {getattr(self, field_name)}; it must be at least 1"
        if self.families is not None and not self.families:
            yield f"{where} takes no model; name at least one in 'families'"
        yield from _lost_options(where, self.options)


def unlike(families: Sequence[str]) -> list[str]:
    """The first of ``families``, and the first that it has of each group of `UNLIKE`: those of a quick session."""
    groups = (families[:1], *UNLIKE)
    firsts = (next((name for name in group if name in families), None) for group in groups)
    return [name for name in dict.fromkeys(firsts) if name is not None]


def laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The fields ``below``, overridden by those ``above``, section by section."""
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = laid_over(merged[name], value) if both else value
    return merged


def _lost_options(where: str, options: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(set(SET_BY_THE_SUITE) & set(options)):
        yield f"{where}: its options set {name!r}, which the suite sets itself; remove it"


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """A known failure. It is strict: the check must fail, and with this type of exception."""

    check: str
    """The identifier, such as ``I7.logprobs``."""
    reason: str
    """Why it fails, best with a link to the issue."""
    owner: str
    """The person in charge of the fix."""
    raises: type[BaseException]
    """Type of its exception; `AssertionError` for a wrong result."""
    layouts: tuple[ParallelLayout | str, ...] | None = None
    """Layouts of the failure, a setting by its full name as ``dp4-hsdp``; None is everywhere."""
    families: tuple[str, ...] | None = None
    """With which tiny models it fails; None is all."""
    dtypes: tuple[DType, ...] | None = None
    """In which dtypes it fails; None is all. Rounding in bfloat16 may hide a small error."""

    def covers(self, check: str, setting: Setting, family: str, dtype: DType) -> bool:
        """Whether this failure was declared."""
        at_layout = self.layouts is None or str(setting) in map(str, self.layouts)
        with_model = self.families is None or family in self.families
        return (
            self.check == check and at_layout and with_model and (self.dtypes is None or dtype in self.dtypes)
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The layouts, models and dtypes that the suite runs for one engine, and its waivers."""

    layouts: tuple[ParallelLayout, ...] = (ParallelLayout(),)
    """The most telling first, and several ranks second. The first two share the models, others run one, in turn;
    further dtypes are run on the second."""
    settings: tuple[Setting, ...] = ()
    """Layouts with options of their own, run after ``layouts``; models rotate over them."""
    dtypes: tuple[DType, ...] = ("float32",)
    families: tuple[str, ...] = DENSE
    """The mixture of experts, `MOE`, comes to these for an engine that declares the capability, and for no other."""
    head_size: int | None = None
    """Tiny models get attention heads of so many numbers, for kernels that take few sizes; None is their own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the engine's config beyond the common ones, such as ``{"options": {...}}``."""
    waivers: tuple[Waiver, ...] = ()
    shared_servers: bool = False
    """For an inference engine that launches servers which take long to start: one server serves all models of the
    same architecture, in sequence. It must take the weights of ``config.model`` when an engine is initialized
    with its address, whatever it had before."""

    @property
    def places(self) -> tuple[Setting, ...]:
        """Every layout, and then the settings."""
        return (*(Setting(layout=layout) for layout in self.layouts), *self.settings)

    def promise(self, spec: EngineSpec, place: Setting, family: str, dtype: DType) -> str:
        """The lines of this profile of ``spec`` that let the suite run ``family`` at ``place``, and the change."""
        origin = spec.conformance or "of an engine without one, Profile(),"
        kind = "layouts" if place in self.places[: len(self.layouts)] else "settings"
        rest = tuple(name for name in place.suited(self.families) if name != family)
        setting = (
            f"; or name the models that the layout takes by a Setting(layout=..., families={rest}) in `settings`, "
            "with layer_multiple or expert_multiple where degrees have to divide"
        )
        return (
            f"the profile {origin} promises more than the engine has: {family!r} in `families` at {place} in "
            f"`{kind}`, with {dtype} in `dtypes`. Remove {family!r} from `families`{setting if rest else ''}"
        )

    def completed(self, spec: EngineSpec) -> Profile:
        """The profile with the models that capabilities of ``spec`` are shown on."""
        shown = {Capability.MOE: (MOE,), Capability.VISION: VISION}
        added = [
            family
            for capability, families in shown.items()
            if spec.supports(capability) and not set(families) & set(self.families)
            for family in families
            if family not in MIXTURES or spec.supports(Capability.MOE)
        ]
        return replace(self, families=(*self.families, *added))

    def violations(self, spec: EngineSpec, known_checks: Collection[str]) -> Iterator[str]:
        """Problems of this profile for an engine with ``spec``."""
        for name in ("layouts", "dtypes", "families"):
            if not getattr(self, name):
                yield f"{name!r} is empty; name at least one"
        yield from self.undeclared_layouts(spec)
        for setting in self.settings:
            yield from setting.violations(self.families)
        yield from _lost_options("the profile", self.options)
        names = list(map(str, self.places))
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"{name!r} is named twice; each layout or setting is run once"
        for family in sorted(set(self.families) - set(BUILT)):
            yield f"unknown model family {family!r}; the suite builds {', '.join(BUILT)}"
        yield from self._undeclared(spec)
        for waiver in self.waivers:
            yield from self._waiver_violations(waiver, known_checks)

    def undeclared_layouts(self, spec: EngineSpec) -> Iterator[str]:
        """Layouts that need a capability which ``spec`` does not declare."""
        for place in self.places:
            missing = ", ".join(sorted(place.layout.needed_capabilities() - spec.capabilities))
            if missing:
                yield f"layout {place} needs {missing}, undeclared by the engine; declare it or drop the layout"

    def _undeclared(self, spec: EngineSpec) -> Iterator[str]:
        for capability, families in ((Capability.MOE, MIXTURES), (Capability.VISION, VISION)):
            for family in sorted(set(self.families) & set(families)) * (not spec.supports(capability)):
                yield f"model {family!r} needs the capability {capability.value!r}, which the engine does not declare"
        if "bfloat16" in self.dtypes and not spec.supports(Capability.BFLOAT16):
            yield "dtype bfloat16 needs the capability 'bfloat16', which the engine does not declare"

    def _waiver_violations(self, waiver: Waiver, known_checks: Collection[str]) -> Iterator[str]:
        where = f"the waiver of {waiver.check!r}"
        if waiver.check not in known_checks:
            yield f"{where} names no check of this suite; remove it"
        for name in ("reason", "owner"):
            if not getattr(waiver, name).strip():
                yield f"{where} has no {name}; write one"
        raises: object = waiver.raises
        if not (isinstance(raises, type) and issubclass(raises, BaseException)):
            yield f"{where}: 'raises' is {raises!r}; name the exception type that the check ends with"
        for layout in sorted(set(map(str, waiver.layouts or ())) - set(map(str, self.places))):
            yield f"{where} names the layout {layout}, which is in neither 'layouts' nor 'settings'"
        for family in sorted(set(waiver.families or ()) - set(self.families)):
            yield f"{where} names the family {family!r}, which is not in 'families'"
        for dtype in sorted(set(waiver.dtypes or ()) - set(self.dtypes)):
            yield f"{where} names the dtype {dtype!r}, which is not in 'dtypes'"
