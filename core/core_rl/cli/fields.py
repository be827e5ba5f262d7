"""Commands that take fields of a recipe: a field that is written as an option is refused with its form."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Any

from typer.core import TyperCommand

from core_rl.errors import ConfigError

__all__ = ["FIELDS", "FieldCommand"]

FIELDS = "FIELD=VALUE"
"""The ``metavar`` of an argument that takes fields."""
CLOSE = 0.8
"""The similarity to an option from which a name is a slip of it."""


class FieldCommand(TyperCommand):
    """A command whose unknown options may be fields of an argument called `FIELDS`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As in the base class; raises `ConfigError` for ``--field value``."""
        parameters = self.get_params(ctx)
        if any(getattr(parameter, "metavar", None) == FIELDS for parameter in parameters):
            options = [
                name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)
            ]
            _refuse_fields_as_options(args, options)
        return super().parse_args(ctx, args)


def _refuse_fields_as_options(arguments: Sequence[str], options: Collection[str]) -> None:
    for number, argument in enumerate(arguments):
        if argument == "--":
            return
        name, assigned, value = argument.partition("=")
        if (
            not name.startswith("--")
            or name in options
            or difflib.get_close_matches(name, options, cutoff=CLOSE)
        ):
            continue
        after = arguments[number + 1 : number + 2]
        if not assigned and after and not after[0].startswith("--") and "=" not in after[0]:
            assigned, value = "=", after[0]
        if assigned:
            field = name[2:].replace("-", "_")
            raise ConfigError(
                f"there is no option {name}; write a field of the recipe without dashes: {field}={value}"
            )
