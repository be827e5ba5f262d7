"""Objects that a config names: by an entry point of the group ``rl_interfaces``, or as ``module:attribute``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from core_rl.config.base import Config
from core_rl.errors import ConfigError
from core_rl.registry.objects import EntryPoint, declared_in, load_entry_point, load_object

GROUP = "rl_interfaces"
"""The entry-point group of interfaces, advantage rules and policy losses."""


def declared(name: str | None = None, group: str = GROUP) -> list[EntryPoint]:
    """The readable entry points of ``group``, or those called ``name``."""
    points = [point for point in declared_in(group) if point.error is None]
    return [point for point in points if name in (None, point.name)]


def find_object(kind: str, name: str, known: Collection[str], form: str, group: str = GROUP) -> object:
    """The object of the entry point ``name`` of ``group``, or of the ``module:attribute`` that it is.

    ``known`` are further names, and ``form`` is what to write, for the message. Raises `ConfigError`.
    """
    if claims := declared(name, group):
        return load_entry_point(kind, claims, ConfigError)
    if ":" in name:
        return load_object(name, f"{kind} {name!r}", ConfigError)
    names = sorted({*known, *(point.name for point in declared(group=group))})
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(
        f"there is no {kind} {name!r}; {hint}Known: {', '.join(names) or 'none'}; or write {form!r}"
    )


class Custom(Config):
    """A function of the user's own, by its name."""

    kind: ClassVar[str]
    """The word for it in messages."""
    built_in: ClassVar[tuple[str, ...]]
    """Names that are taken."""
    type: str
    """``module:function``, or a name among the entry points ``rl_interfaces``."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class, where the name stands for a class; its instance is called."""

    @model_validator(mode="after")
    def _exists(self) -> Self:
        try:
            self.function()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def function(self) -> Callable[..., Any]:
        """The function, or an instance of the class. Raises `ConfigError`."""
        name, settings = self.type, self.settings
        target = find_object(self.kind, name, self.built_in, "module:function")
        if isinstance(target, type):
            try:
                target = target(**settings)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{name!r} does not take the settings {settings}: {error}") from error
        elif settings:
            raise ConfigError(
                f"{name!r} is a function and takes no settings; it was given {sorted(settings)}"
            )
        if not callable(target):
            raise ConfigError(f"{name!r} is {target!r}, which cannot be called")
        return target


def named_or_fields(value: Any) -> Any:
    """``"name"`` is short for ``{"type": "name"}``."""
    return {"type": value} if isinstance(value, str) else value


def named_kind(known: Collection[str]) -> Callable[[Any], str]:
    """The discriminator of a section: its ``type`` where that is in ``known``, else ``custom``."""

    def kind(value: Any) -> str:
        name = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
        return str(name) if name in known else "custom"

    return kind
