"""Commands of the conformance package, in the entry-point group ``core_rl_commands``.

Importing this imports nothing heavy: ``core-rl --help`` does it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from core_rl.cli import PASSED_ON

__all__ = ["bisect", "certify", "checks", "diff", "new_engine", "report"]


def checks(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Checks, or how their names begin, such as I7; all without.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write all of them as a page here.", show_default=False)
    ] = None,
) -> None:
    """Explain the checks of the conformance suite: requirements, reasons, and where to look when it fails.

    Example: core-rl checks I7.logprobs
    """
    from core_rl_conformance import handbook

    known = {check.identifier: check for check in handbook.described_checks()}
    if markdown is not None:
        from core_rl_conformance.report.files import write_text

        write_text(markdown, handbook.checks_page(known.values()))
        return
    selected = handbook.select_checks(known, names or [])
    if names:
        typer.echo("\n\n".join(map(handbook.text_of, selected)))
        return
    width = max(len(check.identifier) for check in selected)
    for check in selected:
        typer.echo(f"{check.identifier.ljust(width)}  {check.title}")


def _print_schema(enabled: bool) -> None:
    if enabled:
        from core_rl_conformance.report.files import SCHEMA_FILE

        typer.echo(SCHEMA_FILE.read_text(encoding="utf-8"), nl=False)
        raise typer.Exit


def report(
    reports: Annotated[
        list[Path],
        typer.Argument(help="Files that pytest --report=FILE wrote.", metavar="REPORT", show_default=False),
    ],
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", help="Write the table here, for a README.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a web page here.", show_default=False)
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(
            "--history", help="Write every check by target and version here, as Markdown.", show_default=False
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check each report as a submission, and print nothing else.")
    ] = False,
    badge: Annotated[
        Path | None,
        typer.Option("--badge", help="Write an SVG badge of one engine here.", show_default=False),
    ] = None,
    profile: Annotated[
        str,
        typer.Option("--profile", help="The profile of the badge: sft, rl-sync, rl-async, moe, lora or vlm."),
    ] = "sft",
    annotations: Annotated[
        bool, typer.Option("--annotations", help="Print failures as annotations of a GitHub workflow.")
    ] = False,
    _schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            callback=_print_schema,
            is_eager=True,
            help="Print the JSON schema of a report, and stop.",
        ),
    ] = False,
) -> None:
    """Merge conformance reports into one scoreboard of engines, and print it as Markdown or write it.

    Of several results for one case of one engine's code, the newest counts. Reports about different code of the
    engine or of the suite stand in columns of their own.

    Example: core-rl report fsdp.json mine.json --html scoreboard.html
    """
    from core_rl_conformance.report import scoreboard
    from core_rl_conformance.report.files import read_reports, write_text

    loaded = dict(zip(reports, read_reports(reports), strict=True))
    if verify:
        from core_rl_conformance.report.verify import verify_reports

        verify_reports({str(path): loaded_report for path, loaded_report in loaded.items()})
        return
    if annotations:
        from core_rl_conformance.report.annotations import annotations_of

        for line in annotations_of(loaded.values()):
            typer.echo(line)
        return
    if badge is not None:
        from core_rl_conformance.report.badge import badge_of

        write_text(badge, badge_of(list(loaded.values()), profile))
        return
    board = scoreboard.merge(loaded.values())
    if markdown is not None:
        write_text(markdown, scoreboard.markdown(board))
    if html is not None:
        write_text(html, scoreboard.scoreboard_page(board))
    if history is not None:
        from core_rl_conformance.report.history import history_markdown

        write_text(history, history_markdown(board))
    if markdown is None and html is None and history is None:
        typer.echo(scoreboard.markdown(board), nl=False)


def new_engine(
    name: Annotated[
        str, typer.Argument(help="The engine's name: lower-case letters, digits and hyphens.", metavar="NAME")
    ],
    directory: Annotated[
        Path | None,
        typer.Option("--directory", help="Write the folder core-rl-NAME in here.", show_default=False),
    ] = None,
    class_prefix: Annotated[
        str | None,
        typer.Option(
            "--class-prefix",
            help="What its classes begin with, instead of NAME in CapWords.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a new engine: a distribution with a data-parallel engine that works, its tests, and its profile.

    Change it into yours, step by step, and keep the conformance suite green.

    Example: core-rl new-engine mine
    """
    from core_rl_conformance.skeleton.write import Skeleton, write_skeleton

    skeleton = Skeleton.named(name, class_prefix)
    place = (directory or Path()) / skeleton.distribution
    for path in write_skeleton(skeleton, place):
        typer.echo(f"wrote {path}")
    typer.echo(
        f'\nNext: pip install -e "{place}[test]"\n'
        f"      core-rl engines show {name}\n"
        f"      pytest --engine={name} --pyargs core_rl_conformance --quick"
    )


def bisect(
    check: Annotated[
        str,
        typer.Option("--check", help="The check, such as I7.logprobs.", metavar="CHECK", show_default=False),
    ],
    good: Annotated[
        str, typer.Option("--good", help="A version that passes.", metavar="PACKAGE==A", show_default=False)
    ],
    bad: Annotated[
        str,
        typer.Option(
            "--bad", help="A version that fails, newer or older.", metavar="PACKAGE==B", show_default=False
        ),
    ],
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="Default: the engine that needs PACKAGE.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--directory", help="Keep the environments and their reports here.", show_default=False),
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Argument(
            help="Options of the suite after --, in place of --quick.", metavar="OPTION", show_default=False
        ),
    ] = None,
) -> None:
    """Find the version of a package from which a check fails, with one environment for each version that is tried.

    Each environment has one version of the package, and all other packages of this Python.

    Example: core-rl bisect --check I7.logprobs --good transformers==5.13.0 --bad transformers==5.23.0 --engine fsdp
    """
    from core_rl_conformance.versions import bisect as search
    from core_rl_conformance.versions.environments import kept_directory

    package, first, last = search.span(good, bad)
    name = engine or search.engine_of(package)
    arguments = [f"--engine={name}", f"--check={check}", *(options or ["--quick"]), *search.SUITE]
    versions = search.versions_between(package, first, last)
    typer.echo(f"{check} of {name} with {len(versions)} versions of {package}, {first} to {last}")

    with kept_directory(directory) as place:

        def attempt(version: str) -> search.Trial:
            trial = search.trial_of(package, version, arguments, place)
            typer.echo(f"{package} {version}: {trial.verdict}: {trial.reason}")
            return trial

        result = search.bisect(versions, attempt)
    typer.echo(search.summary(check, package, result))


def certify(
    name: Annotated[
        str,
        typer.Argument(
            help="The engine, as 'core-rl engines' lists it, or the trainer of an entry point rl_trainers.",
            metavar="NAME",
            show_default=False,
        ),
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            help="Options of the suite and of pytest, such as --quick or --report=FILE.json.",
            metavar=PASSED_ON,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run the conformance suite on an engine or a trainer, without a checkout.

    The same as pytest --engine=NAME or --trainer=NAME with --pyargs core_rl_conformance.

    Example: core-rl certify reference --quick
    """
    import pytest

    from core_rl.registry.objects import declared_in
    from core_rl_conformance.trainers.spec import GROUP

    kind = "trainer" if any(point.name == name for point in declared_in(GROUP)) else "engine"
    arguments = [f"--{kind}={name}", *(options or ()), "--pyargs", "core_rl_conformance"]
    raise typer.Exit(int(pytest.main([*arguments, "-p", "no:cacheprovider"])))


def diff(
    left: Annotated[
        str,
        typer.Argument(
            help="A trainer, and the file of its settings.", metavar="NAME:FILE", show_default=False
        ),
    ],
    right: Annotated[
        str, typer.Argument(help="The other trainer and its file.", metavar="NAME:FILE", show_default=False)
    ],
    rollouts: Annotated[
        Path | None,
        typer.Option(
            "--rollouts",
            help="A JSONL file with a completion in each line; drawn by default.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the tokens.")] = 0,
) -> None:
    """Compare two trainers on frozen rollouts: name each term of the loss in which they differ.

    The terms are read from gradients of a tiny model. NAME is a trainer of an entry point rl_trainers that takes
    files of settings, and FILE what its framework reads, such as a recipe of core-rl-trainer.

    Example: core-rl diff trl-grpo:settings.py core-rl:recipe.yaml --rollouts frozen.jsonl
    """
    from core_rl_conformance.differences.run import compare
    from core_rl_conformance.differences.text import report_of

    comparison = compare(left, right, rollouts, seed)
    typer.echo(report_of(left, right, comparison))
