"""The command line ``core-rl``. Exit codes: `core_rl.errors.ExitCode`.

Installed distributions add commands under the entry-point group `GROUP`: each entry point names a function with
typer's annotations, in a module that is light to import. A command that cannot be loaded is listed with its reason,
and hides no other.
"""

from __future__ import annotations

import difflib
import gc
import io
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from core_rl.cli.engines import app as engines_app
from core_rl.errors import ConfigError, CoreRLError, EngineBroken, RunStopped
from core_rl.registry.objects import EntryPoint, declared_in, load_entry_point
from core_rl.version import __version__

FIELDS = "FIELD=VALUE"
"""The ``metavar`` of an argument that takes fields."""
PASSED_ON = "OPTION"
"""The ``metavar`` of an argument that takes the options of another program."""
CLOSE = 0.8
"""The similarity to an option from which a name is a slip of it."""


class FieldCommand(TyperCommand):
    """A command whose unknown options may be fields of an argument called `FIELDS`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as the base class does; raises `ConfigError` for ``--field value``."""
        parameters = self.get_params(ctx)
        metavars = {getattr(parameter, "metavar", None) for parameter in parameters}
        ctx.ignore_unknown_options = PASSED_ON in metavars
        if FIELDS in metavars:
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


BUILT_IN = ("engines",)
LINES, CHARACTERS = 24, 900
"""Lines of an error, and characters of each, that are printed."""

GROUP = "core_rl_commands"
"""The entry-point group that a distribution declares its commands in."""


def plugin_commands() -> dict[str, Callable[..., Any] | EngineBroken]:
    """Functions by the names of their commands, in alphabetical order, or the error of what cannot be loaded.

    Of two with one name neither works, and the error names both.
    """
    claims: dict[str, list[EntryPoint]] = {}
    for point in declared_in(GROUP):
        if point.error is None:  # `core-rl engines` reports damaged metadata
            claims.setdefault(point.name, []).append(point)
    return {name: _load(points) for name, points in sorted(claims.items())}


def _load(claims: list[EntryPoint]) -> Callable[..., Any] | EngineBroken:
    try:
        function = load_entry_point("command", claims, EngineBroken)
    except EngineBroken as broken:
        return broken
    return (
        function if callable(function) else EngineBroken(f"{claims[0].described('command')} is no function")
    )


def build_app(*, plugins: bool = True) -> typer.Typer:
    """The command line; ``plugins`` adds the commands of other distributions, which costs a look at each."""
    app = typer.Typer(
        name="core-rl",
        help="Train language models with any installed engine, by name.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    app.add_typer(engines_app, name="engines")
    for name, command in plugin_commands().items() if plugins else ():
        if name not in BUILT_IN:
            _add(app, name, command)
    return app


def _add(app: typer.Typer, name: str, command: Callable[..., Any] | EngineBroken) -> None:
    if not isinstance(command, EngineBroken):
        app.command(name=name, cls=FieldCommand)(command)
        return
    error = command

    def broken() -> None:
        raise error

    # Whatever its arguments are, the answer is the error.
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name=name, help=f"(broken) {error}", context_settings=anything)(broken)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"core-rl {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; an error of core-rl becomes one message on stderr and an exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # of a terminal that may not have all letters of the data
            stream.reconfigure(errors="backslashreplace")
    app = build_app(plugins=not arguments or arguments[0] not in BUILT_IN)
    try:
        app(arguments, prog_name="core-rl")
    except CoreRLError as error:
        text = str(error) if isinstance(error, RunStopped) else f"error: {error}"
        # Notes of several lines are tracebacks of ranks, which a run has in its log.
        notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
        lines = ["".join(_ends(line, CHARACTERS, " [… {} more characters …] ")) for line in text.splitlines()]
        shown = _ends(lines, LINES, "[… {} more lines …]")
        typer.secho("\n".join([*shown, *notes]), fg=typer.colors.RED, err=True)
        sys.exit(error.exit_code)
    finally:
        # The interpreter's end would search all modules of torch and transformers for garbage: half a second.
        gc.freeze()


def _ends(parts: Sequence[str], most: int, gap: str) -> Sequence[str]:
    if len(parts) <= most:
        return parts
    head, tail = most * 2 // 3, most // 3
    return [*parts[:head], gap.format(len(parts) - head - tail), *parts[-tail:]]
