"""Commands that installed distributions add to ``core-rl``, under the entry-point group ``core_rl_commands``.

The entry point names a function with typer's annotations, in a module that is light to import. What cannot
be loaded is listed with its reason, and hides no other command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import importlib_metadata as metadata

from core_rl.errors import EngineBroken, EngineError
from core_rl.registry.discovery import load_object

__all__ = ["GROUP", "PluginCommand", "plugin_commands"]

GROUP = "core_rl_commands"
"""The entry-point group that a distribution declares its commands in."""


@dataclass(frozen=True, kw_only=True)
class PluginCommand:
    """One command; exactly one of ``function`` and ``error``."""

    name: str
    function: Callable[..., Any] | None = None
    error: EngineError | None = None


def plugin_commands() -> list[PluginCommand]:
    """All of them in alphabetical order; of two with one name, neither works, and the error names both."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, value, distribution in _declared():
        claims = found.setdefault(name, [])
        # Two copies of one distribution on sys.path are one claim; Python imports the first.
        if distribution not in [claimed for _, claimed in claims]:
            claims.append((value, distribution))
    return [_load(name, claims) for name, claims in sorted(found.items())]


def _declared() -> Iterator[tuple[str, str, str]]:
    """Name, value and distribution of every entry point of the group."""
    for distribution in metadata.Distribution.discover():
        try:
            points = [point for point in distribution.entry_points if point.group == GROUP]
            declared = [(point.name, point.value, distribution.name) for point in points]
        except (FileNotFoundError, KeyError, TypeError, ValueError):
            # Damaged metadata. `core-rl engines` says so where engines are concerned.
            continue
        yield from declared


def _load(name: str, claims: list[tuple[str, str]]) -> PluginCommand:
    origins = " and ".join(f"{distribution} ({value!r})" for value, distribution in claims)
    if len(claims) > 1:
        error = EngineBroken(f"command {name!r} is claimed by {origins}; uninstall one of them")
        return PluginCommand(name=name, error=error)
    try:
        function = load_object(claims[0][0], f"command {name!r} of {origins}")
    except EngineError as broken:
        return PluginCommand(name=name, error=broken)
    if not callable(function):
        return PluginCommand(name=name, error=EngineBroken(f"command {name!r} of {origins} is no function"))
    return PluginCommand(name=name, function=function)
