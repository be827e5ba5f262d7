"""What a plugin tells the suite about its engine: what to check it on, and what is known to fail.

Light: the module that a spec's ``conformance`` names needs nothing but this to be imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from core_rl.config.engine import DType
from core_rl.config.layout import ParallelLayout
from core_rl.engines.spec import EngineSpec

__all__ = ["FAMILIES", "Profile", "Waiver"]

FAMILIES = ("qwen3", "llama", "qwen2", "gpt2")
"""The tiny models that the suite can build."""


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """A known failure. It is strict: the check must fail, and with this type of exception."""

    check: str
    """The identifier, such as ``I7.logprobs``."""
    reason: str
    """Why it fails, best with a link to the issue."""
    owner: str
    """Who will mend it."""
    raises: type[BaseException]
    """How it fails; `AssertionError` for a wrong result."""
    layouts: tuple[ParallelLayout, ...] | None = None
    """Where it fails; None is everywhere."""
    families: tuple[str, ...] | None = None
    """With which tiny models it fails; None is all."""

    def covers(self, check: str, layout: ParallelLayout, family: str) -> bool:
        """Whether this failure was declared."""
        here = self.layouts is None or layout in self.layouts
        return self.check == check and here and (self.families is None or family in self.families)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What the suite runs for one engine."""

    layouts: tuple[ParallelLayout, ...] = (ParallelLayout(),)
    """The most telling ones first: on the first two every model and dtype is run, on others models take turns."""
    dtypes: tuple[DType, ...] = ("float32",)
    families: tuple[str, ...] = FAMILIES
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the engine's config beyond the common ones, such as ``{"options": {...}}``."""
    waivers: tuple[Waiver, ...] = ()

    def violations(self, spec: EngineSpec, known_checks: Collection[str]) -> Iterator[str]:
        """What is wrong with this profile, for an engine with ``spec``."""
        for name in ("layouts", "dtypes", "families"):
            if not getattr(self, name):
                yield f"{name!r} is empty; name at least one"
        for layout in self.layouts:
            missing = ", ".join(sorted(layout.needed_capabilities() - spec.capabilities))
            if missing:
                yield f"layout {layout} needs {missing}, undeclared by the engine; declare it or drop the layout"
        for family in sorted(set(self.families) - set(FAMILIES)):
            yield f"unknown model family {family!r}; the suite builds {', '.join(FAMILIES)}"
        if "bfloat16" in self.dtypes and "bfloat16" not in spec.capabilities:
            yield "dtype bfloat16 needs the capability 'bfloat16', which the engine does not declare"
        for waiver in self.waivers:
            yield from self._waiver_violations(waiver, known_checks)

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
        for layout in sorted(set(map(str, waiver.layouts or ())) - set(map(str, self.layouts))):
            yield f"{where} names the layout {layout}, which is not in 'layouts'"
        for family in sorted(set(waiver.families or ()) - set(self.families)):
            yield f"{where} names the family {family!r}, which is not in 'families'"
