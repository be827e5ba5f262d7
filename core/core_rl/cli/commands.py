"""Commands that installed distributions add to ``core-rl``, under the entry-point group ``core_rl_commands``.

The entry point names a function with typer's annotations, in a module that is light to import. What cannot
be loaded is listed with its reason, and hides no other command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core_rl.errors import CoreRLError, EngineBroken
from core_rl.registry.objects import EntryPoint, declared_in, load_entry_point

__all__ = ["GROUP", "PluginCommand", "plugin_commands"]

GROUP = "core_rl_commands"
"""The entry-point group that a distribution declares its commands in."""


@dataclass(frozen=True, kw_only=True)
class PluginCommand:
    """One command; exactly one of ``function`` and ``error``."""

    name: str
    function: Callable[..., Any] | None = None
    error: CoreRLError | None = None


def plugin_commands() -> list[PluginCommand]:
    """All of them in alphabetical order; of two with one name, neither works, and the error names both."""
    found: dict[str, list[EntryPoint]] = {}
    for point in declared_in(GROUP):
        if point.error is None:  # `core-rl engines` reports damaged metadata
            found.setdefault(point.name, []).append(point)
    return [_load(name, claims) for name, claims in sorted(found.items())]


def _load(name: str, claims: list[EntryPoint]) -> PluginCommand:
    try:
        function = load_entry_point("command", claims, EngineBroken)
    except EngineBroken as broken:
        return PluginCommand(name=name, error=broken)
    if not callable(function):
        return PluginCommand(
            name=name, error=EngineBroken(f"{claims[0].described('command')} is no function")
        )
    return PluginCommand(name=name, function=function)
