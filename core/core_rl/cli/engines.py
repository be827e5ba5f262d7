"""``core-rl engines``: the installed engines, their capabilities and config fields."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core_rl.config.capability import Capability
from core_rl.errors import CoreRLError, EngineAmbiguous, EngineBroken, EngineIncompatible
from core_rl.registry.engines import EngineEntry, get_spec, list_engines, load_config
from core_rl.registry.spec import PROTOCOL_VERSION, EngineSpec

if TYPE_CHECKING:
    from core_rl.config.describe import FieldHelp

app = typer.Typer()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables.")]

_STATUS: dict[type[CoreRLError], str] = {
    EngineAmbiguous: "ambiguous",
    EngineBroken: "broken",
    EngineIncompatible: "incompatible",
}


@app.callback(invoke_without_command=True)
def engines(
    context: typer.Context,
    as_json: AsJson = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if any engine is unusable.")] = False,
) -> None:
    """List the installed engines, unusable ones with the reason, or show one.

    Example: core-rl engines show reference
    """
    if context.invoked_subcommand is not None:
        return
    entries = list_engines()
    if as_json:
        listed = [_entry_json(entry) for entry in entries]
        typer.echo(json.dumps({"protocol": PROTOCOL_VERSION, "engines": listed}, indent=2))
    else:
        _print_entries(entries)
    if strict and any(entry.error for entry in entries):
        raise typer.Exit(1)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="The engine, as 'core-rl engines' lists it.", metavar="NAME")],
    as_json: AsJson = False,
    check: Annotated[
        bool,
        typer.Option(help="Import the backend, and fail where it differs from the declared capabilities."),
    ] = True,
) -> None:
    """Show what one engine supports, and every field of its config with type, default and help."""
    from core_rl.config.describe import describe_fields  # pydantic; the list needs none

    spec = get_spec(name)
    fields = describe_fields(load_config(spec))
    if as_json:
        typer.echo(json.dumps(_spec_json(spec) | {"fields": [_field_json(f) for f in fields]}, indent=2))
    else:
        _print_spec(spec, fields)
    if check:
        from core_rl.engine.loading import load_backend  # torch

        load_backend(spec)


def _status(entry: EngineEntry) -> str:
    return "ok" if entry.error is None else _STATUS.get(type(entry.error), "unusable")


def _spec_json(spec: EngineSpec) -> dict[str, Any]:
    return asdict(spec) | {"capabilities": sorted(spec.capabilities)}


def _entry_json(entry: EngineEntry) -> dict[str, Any]:
    error = entry.error and {"type": type(entry.error).__name__, "message": str(entry.error)}
    return {
        "name": entry.name,
        "status": _status(entry),
        "distribution": entry.distribution,
        "version": entry.version,
        "entry_point": entry.value,
        "path": entry.path,
        "spec": entry.spec and _spec_json(entry.spec),
        "error": error,
    }


def _field_json(field: FieldHelp) -> dict[str, Any]:
    from pydantic_core import to_jsonable_python  # the list needs no pydantic

    return asdict(field) | {"default": to_jsonable_python(field.default)}


def _print_entries(entries: list[EngineEntry]) -> None:
    from rich.console import Console  # JSON output needs no rich
    from rich.markup import escape
    from rich.table import Table

    table = Table("name", "kind", "package", "protocol", "supports", "status", box=None, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for entry in entries:
        spec, status = entry.spec, _status(entry)
        table.add_row(
            f"[bold]{escape(entry.name)}[/]",
            spec.kind if spec else "?",
            escape(f"{entry.distribution} {entry.version}"),
            ".".join(map(str, spec.protocol)) if spec else "?",
            f"{len(spec.capabilities)}/{len(Capability)}" if spec else "?",
            f"[{'green' if status == 'ok' else 'red'}]{status}[/]",
        )
    console = Console(highlight=False)
    console.print(table)
    for entry in entries:
        if entry.error is not None:
            console.print(f"[red]{escape(entry.name)}:[/] {escape(str(entry.error))}")
    console.print("Details of one: core-rl engines show NAME")


def _print_spec(spec: EngineSpec, fields: list[FieldHelp]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding

    console = Console(highlight=False)
    protocol = ".".join(map(str, spec.protocol))
    console.print(f"[bold]{spec.name}[/]: {spec.kind} engine, protocol {protocol}")
    console.print(escape(spec.description))
    supported = [capability for capability in Capability if spec.supports(capability)]
    missing = [capability for capability in Capability if not spec.supports(capability)]
    console.print(f"\n[green]supported:[/] {', '.join(supported) or 'nothing optional'}")
    console.print(f"[red]not supported:[/] {', '.join(missing) or 'nothing'}\n")
    for field in fields:
        value = "[bold]required[/]" if field.required else f"default {escape(_written(field))}"
        console.print(f"[bold cyan]{escape(field.name)}[/]  {escape(field.type)}  {value}", soft_wrap=True)
        console.print(Padding(escape(field.help), (0, 0, 0, 4), expand=False))


def _written(field: FieldHelp) -> str:
    """The default as a recipe would write it."""
    default = _field_json(field)["default"]
    if isinstance(default, dict) and field.type.startswith("section"):
        return "as below"
    return default if isinstance(default, str) and default else json.dumps(default)
