"""Objects that a config names: by an entry point of the group ``rl_interfaces``, or as ``module:attribute``."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import importlib_metadata

from core_rl.errors import ConfigError

__all__ = ["GROUP", "custom_callable", "load_object", "named_kind", "named_or_fields", "not_found"]

GROUP = "rl_interfaces"


def load_object(name: str, target: str) -> object:
    """What ``target``, a ``module:attribute``, stands for; `ConfigError` that tells ``name`` if it cannot be had."""
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name!r} ({target}) cannot be loaded: {error}") from error


def not_found(what: str, name: str, known: Collection[str], form: str) -> str:
    """The message for an unknown ``name``."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"there is no {what} {name!r}; {hint}Known: {', '.join(sorted(known))}; or write {form!r}"


def custom_callable(
    what: str, name: str, known: Collection[str], settings: Mapping[str, Any]
) -> Callable[..., Any]:
    """The function that ``name`` stands for, or, where it is a class, an instance made with ``settings``.

    ``known`` are the names that are built in, for the message. Raises `ConfigError`.
    """
    points = list(importlib_metadata.entry_points(group=GROUP, name=name))
    if len(points) > 1:
        raise ConfigError(
            f"the name {name!r} is claimed by {', '.join(p.value for p in points)}; uninstall one"
        )
    if not points and ":" not in name:
        others = {point.name for point in importlib_metadata.entry_points(group=GROUP)}
        raise ConfigError(not_found(what, name, {*known, *others}, "module:function"))
    found = load_object(name, points[0].value if points else name)
    if isinstance(found, type):
        try:
            found = found(**settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name!r} does not take the settings {dict(settings)}: {error}") from error
    elif settings:
        raise ConfigError(f"{name!r} is a function and takes no settings; it was given {sorted(settings)}")
    if not callable(found):
        raise ConfigError(f"{name!r} is {found!r}, which cannot be called")
    return found


def named_or_fields(value: Any) -> Any:
    """``"name"`` is short for ``{"type": "name"}``."""
    return {"type": value} if isinstance(value, str) else value


def named_kind(known: Collection[str]) -> Callable[[Any], str]:
    """The discriminator of a section: its ``type`` where that is in ``known``, else ``custom``."""

    def kind(value: Any) -> str:
        name = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
        return str(name) if name in known else "custom"

    return kind
