"""The checks: what marks a function as one, and how all of them are found.

A check is a plain function over a `EngineUnderTest` in a module of `core_rl_conformance.checks`::

    @check("I9.dropout-off")
    def dropout_is_off_in_forward(subject: EngineUnderTest) -> None:
        '''Requirement.

        Why: the real bug that it prevents.
        Look at: where the cause is when it fails.
        '''

To add one, write it there, and write the page again: ``core-rl checks --markdown docs/checks.md``.

A distribution adds checks of its own by the entry-point group ``core_rl_checks``, whose values name such functions.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeVar

from core_rl.config.capability import Capability
from core_rl.config.engine import DType
from core_rl.errors import ConfigError
from core_rl.registry.objects import declared_in, load_entry_point
from core_rl.registry.spec import EngineKind
from core_rl_conformance.profile import MIXTURES, VISION

CHECKS_DIRECTORY = Path(__file__).parent / "checks"
GROUP = "core_rl_checks"
"""The entry-point group that a distribution declares its checks in."""
ATTRIBUTE = "__conformance_check__"
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=(?:Why|Look at):)")
IDENTIFIER = re.compile(r"([IT]\d+|contract)\.[a-z0-9]+(-[a-z0-9]+)*")
TargetKind = EngineKind | Literal["trainer"]
"""The kind of an engine, or a whole trainer as a black box."""
Each = Literal["layout and model", "layout", "engine"]

Function = TypeVar("Function", bound=Callable[..., None])


@dataclass(frozen=True)
class Check:
    """The identity, requirements and description of a check. As the decorator `check` it marks a function as one."""

    identifier: str
    """Stable: ``I7.logprobs`` shows the invariant I7, ``contract.x`` a rule of the interface."""
    _: KW_ONLY
    requires: AbstractSet[Capability] = frozenset()
    """The check is *not supported* for an engine that lacks any of these, or what its families and dtype need."""
    kind: TargetKind = "train"
    """The engines that it is for, or trainers."""
    partner: EngineKind | None = None
    """A second engine of the session that it needs: it runs for every pair of engines of these kinds."""
    partner_requires: AbstractSet[Capability] = frozenset()
    """Capabilities that the partner must declare."""
    each: Each = "layout and model"
    """Scope of its repetition."""
    min_dp: int = 1
    """Least number of data-parallel ranks."""
    min_cp: int = 1
    """Least number of ranks that share sequences."""
    min_layouts: int = 1
    """Least number of layouts in the profile."""
    on_three_ranks: bool = False
    """Whether it runs on three data-parallel ranks too, whatever the layouts of the profile."""
    families: tuple[str, ...] | None = None
    """The tiny models that it can use; None is all."""
    dtype: DType | None = None
    """The only dtype that it is about; None is all."""
    images: bool = False
    """Whether it runs on vision-language models, with images, as well."""
    quick: bool = True
    """Whether quick sessions run it."""
    any_model: bool = False
    """Whether it runs on a user's model too (``--model-dir``): it invents no config and no head."""
    description: str = ""
    """Docstring: the requirement, the reason, and where to look."""
    function: Callable[..., None] = lambda _: None
    """The check itself; it takes a `EngineUnderTest`."""

    def __post_init__(self) -> None:
        families, implied = set(self.families or ()), set()
        implied |= {Capability.VISION} if families and families <= set(VISION) else set()
        implied |= {Capability.MOE} if families and families <= set(MIXTURES) else set()
        implied |= {Capability.BFLOAT16} if self.dtype == "bfloat16" else set()
        object.__setattr__(self, "requires", frozenset(self.requires) | implied)
        object.__setattr__(self, "partner_requires", frozenset(self.partner_requires))

    def __call__(self, function: Function) -> Function:
        """Mark ``function`` as this check; raises `ValueError` if identifier or docstring do not follow the rules."""
        description = "\n".join(line.strip() for line in (function.__doc__ or "").strip().splitlines())
        if not IDENTIFIER.fullmatch(self.identifier):
            raise ValueError(
                f"check identifier {self.identifier!r} must look like 'I7.logprobs' or 'contract.outputs'"
            )
        absent = [part for part in ("Why:", "Look at:") if part not in description]
        if absent:
            raise ValueError(
                f"the docstring of check {self.identifier!r} lacks {absent}; say why, and where to look"
            )
        setattr(function, ATTRIBUTE, replace(self, description=description, function=function))
        return function

    @property
    def title(self) -> str:
        """The first line of the description."""
        return self.description.splitlines()[0]

    @property
    def anchor(self) -> str:
        """Anchor of its heading in ``docs/checks.md``."""
        return self.identifier.replace(".", "").lower()

    @property
    def asks(self) -> str:
        """The kind of engine and the capabilities that it must declare, in a few words."""
        parts = ["trainers" if self.kind == "trainer" else f"{self.kind} engines"]
        parts += [f"together with another {self.partner} engine"] if self.partner else []
        parts += [f"with {', '.join(sorted(self.requires))}"] if self.requires else []
        parts += (
            [f"the other with {', '.join(sorted(self.partner_requires))}"] if self.partner_requires else []
        )
        return ", ".join(parts)

    @property
    def where_to_look(self) -> str:
        """The part of the description for the author of a failing engine."""
        _, marker, rest = self.description.partition("Look at:")
        return " ".join(rest.split()) if marker else ""


check = Check


def natural_order(identifier: str) -> tuple[int, str]:
    """A sorting key: ``I2.x`` before ``I10.x``, rules of the interface after them, and trainers' at the end."""
    invariant, _, name = identifier.partition(".")
    number = int(invariant[1:]) if invariant[1:].isdigit() else 1000
    return (2000 + number if invariant.startswith("T") else number, name)


def paragraphs_of(description: str) -> list[str]:
    """The requirement, the reason and the places to look at, each in one line."""
    return [" ".join(part.split()) for part in PARAGRAPH.split(description)]


def check_of(function: object) -> Check | None:
    """The check that ``function`` is, if it is one."""
    check = getattr(function, ATTRIBUTE, None)
    return check if isinstance(check, Check) else None


def load_checks() -> dict[str, Check]:
    """All checks by identifier: the suite's in the order of modules, then `declared_checks`. Imports torch.

    Raises `ConfigError` when two checks have one identifier, or when a declared one cannot be loaded.
    """
    checks: dict[str, Check] = {}
    names = sorted(module.name for module in pkgutil.iter_modules([str(CHECKS_DIRECTORY)]))
    modules = (importlib.import_module(f"core_rl_conformance.checks.{name}") for name in names)
    for check in (*(one for module in modules for one in checks_in(module)), *declared_checks()):
        if check.identifier in checks:
            raise ConfigError(
                f"two checks are called {check.identifier!r}, of the modules {check.function.__module__} and "
                f"{checks[check.identifier].function.__module__}; identifiers are unique"
            )
        checks[check.identifier] = check
    return checks


def checks_in(module: ModuleType) -> list[Check]:
    """The checks that ``module`` defines, in order."""
    checks = (check_of(value) for value in vars(module).values())
    return [one for one in checks if one is not None and one.function.__module__ == module.__name__]


def declared_checks() -> list[Check]:
    """The checks of installed distributions, by the entry-point group ``core_rl_checks``; each names one function.

    Raises `ConfigError` that names the distribution of an unimportable or invalid check.
    """
    checks = []
    for point in declared_in(GROUP):
        if point.error is not None:  # `core-rl engines` reports damaged metadata
            continue
        check = check_of(load_entry_point("check", [point], ConfigError))
        if check is None:
            raise ConfigError(f"{point.described('check')} is no check; decorate the function with @check")
        checks.append(check)
    return checks
