"""Commands of the conformance package, in the entry-point group ``core_rl_commands``.

Importing this imports nothing heavy: ``core-rl --help`` does it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from core_rl.cli import PASSED_ON


def checks(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Checks, or how their names begin, such as I7; all without.", metavar="NAME"),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write all of them as a page here.")
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
        from core_rl_conformance.report.model import report_schema

        typer.echo(json.dumps(report_schema(), indent=2))
        raise typer.Exit


def report(
    reports: Annotated[
        list[Path], typer.Argument(help="Files that pytest --report=FILE wrote.", metavar="REPORT")
    ],
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write the table here, for a README.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a web page here.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check each report as a submission, and print nothing else.")
    ] = False,
    badge: Annotated[
        Path | None, typer.Option("--badge", help="Write an SVG badge of one engine here.")
    ] = None,
    profile: Annotated[
        str,
        typer.Option("--profile", help="The profile of the badge: sft, rl-sync, rl-async, moe, lora or vlm."),
    ] = "sft",
    versions: Annotated[
        Path | None, typer.Option("--versions", help="Write a page of the environments of REPORTS.")
    ] = None,
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
    if badge is not None:
        from core_rl_conformance.report.html import badge_of

        write_text(badge, badge_of(list(loaded.values()), profile))
        return
    if versions is not None:
        page = scoreboard.versions_page({path.stem: entry for path, entry in loaded.items()})
        write_text(versions, page)
        return
    board = scoreboard.merge(loaded.values())
    if markdown is not None:
        write_text(markdown, scoreboard.markdown(board))
    if html is not None:
        write_text(html, scoreboard.scoreboard_page(board))
    if markdown is None and html is None:
        typer.echo(scoreboard.markdown(board), nl=False)


def new_engine(
    name: Annotated[
        str, typer.Argument(help="The engine's name: lower-case letters, digits and hyphens.", metavar="NAME")
    ],
    directory: Annotated[
        Path | None, typer.Option("--directory", help="Write the folder core-rl-NAME in here.")
    ] = None,
    class_prefix: Annotated[
        str | None,
        typer.Option("--class-prefix", help="What its classes begin with, instead of NAME in CapWords."),
    ] = None,
    kind: Annotated[
        Literal["train", "inference"], typer.Option("--kind", help="Train or inference engine.")
    ] = "train",
) -> None:
    """Write a new engine: a distribution with an engine that works, its tests, and its profile.

    A train engine is data parallel, and an inference engine calls HTTP servers, with one to try it with. Change it into
    yours, step by step, and keep the conformance suite green.

    Example: core-rl new-engine mine
    """
    from core_rl_conformance.skeleton import Skeleton, write_skeleton

    skeleton = Skeleton.named(name, class_prefix, kind)
    place = (directory or Path()) / skeleton.distribution
    for path in write_skeleton(skeleton, place):
        typer.echo(f"wrote {path}")
    typer.echo(
        f'\nNext: pip install -e "{place}[test]"\n'
        f"      core-rl engines show {name}\n"
        f"      pytest --engine={name} --pyargs core_rl_conformance --quick"
    )


def certify(
    name: Annotated[
        str,
        typer.Argument(
            help="The engine, as 'core-rl engines' lists it, or the trainer of an entry point rl_trainers.",
            metavar="NAME",
        ),
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            help="Options of the suite and of pytest, such as --quick or --report=FILE.json.",
            metavar=PASSED_ON,
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


def doctor(  # noqa: PLR0913, PLR0917  (the options of a command)
    engines: Annotated[
        list[str],
        typer.Argument(help="Each NAME or NAME:LAYOUT, such as fsdp:dp2 or vllm.", metavar="ENGINE"),
    ],
    model: Annotated[Path, typer.Option("--model", help="The directory of a Hugging Face model.")],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", help="Sequences, a line each: token ids, a text or a chat.", metavar="FILE.jsonl"
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option("--dtype", help="Default: each engine's first.")
    ] = None,
    truncate_layers: Annotated[
        int | None,
        typer.Option(
            "--truncate-layers", min=1, help="Only the first N layers, or one of each kind.", metavar="N"
        ),
    ] = None,
    keep_experts: Annotated[
        int | None,
        typer.Option("--keep-experts", min=1, help="Only the first N experts of a layer.", metavar="N"),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option("--vocab", min=64, help="Only the first N words.", metavar="N")
    ] = None,
    server: Annotated[
        str | None, typer.Option("--server", help="A running server of the model.", metavar="URL")
    ] = None,
    wire: Annotated[
        str | None,
        typer.Option(
            "--wire", help="Its interface: openai, sglang, vllm, or an engine's name.", metavar="WIRE"
        ),
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Its weights may change: judge a weight sync, too.")
    ] = False,
    reproductions: Annotated[
        Path | None,
        typer.Option(
            "--repro", help="Write scripts without core-rl that show the differences here.", metavar="DIR"
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of drawn sequences.")] = 0,
    still_steps: Annotated[
        int,
        typer.Option(
            "--lr0",
            min=0,
            help="Besides, N steps and syncs at learning rate 0: nothing may move.",
            metavar="N",
        ),
    ] = 0,
    json_file: Annotated[
        str | None,
        typer.Option("--json", help="Write the verdict as JSON here; - prints it.", metavar="FILE"),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a web page here.")] = None,
) -> None:
    """Say where engines part first on a model, and which of them is off the float64 oracle.

    Exit codes: 0 nothing found, 1 a finding, 2 an engine could not be judged.

    Example: core-rl doctor fsdp:dp2 megatron:tp3 --model SmolLM2-135M --truncate-layers 2
    """
    from core_rl.errors import ConfigError
    from core_rl_conformance.doctor import diagnose
    from core_rl_conformance.report.files import write_text
    from core_rl_conformance.servers.options import ServerArguments
    from core_rl_conformance.smaller_model import Cuts

    cuts = Cuts(layers=truncate_layers, experts=keep_experts, vocabulary=vocabulary)
    if server is None and (wire or take_over):
        raise ConfigError("--wire and --take-over are of a server; give --server=URL, or leave them out")
    arguments = ServerArguments(
        url=server or "", wire=wire or "", model_dir=str(model), take_over=take_over, dtype=dtype
    )
    served = arguments if server else None
    diagnosis = diagnose(engines, model, data, dtype, cuts, served, reproductions, seed, still_steps)
    document = diagnosis.model_dump_json(indent=2)
    typer.echo(document if json_file == "-" else diagnosis.text)
    if json_file not in (None, "-"):
        write_text(Path(json_file), f"{document}\n")
    if html is not None:
        write_text(html, diagnosis.page)
    raise typer.Exit(diagnosis.exit_code)


def diff(
    left: Annotated[
        str, typer.Argument(help="A trainer, and the file of its settings.", metavar="NAME:FILE")
    ],
    right: Annotated[str, typer.Argument(help="The other trainer and its file.", metavar="NAME:FILE")],
    rollouts: Annotated[
        Path | None,
        typer.Option("--rollouts", help="A JSONL file with a completion in each line; drawn by default."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the tokens.")] = 0,
) -> None:
    """Compare two trainers on frozen rollouts: name each term of the loss in which they differ.

    The terms are read from gradients of a tiny model. NAME is a trainer of an entry point rl_trainers that takes
    files of settings, and FILE what its framework reads, such as a recipe of core-rl-trainer.

    Example: core-rl diff trl-grpo:settings.py core-rl:recipe.yaml --rollouts frozen.jsonl
    """
    from core_rl_conformance.differences.replay import report_of
    from core_rl_conformance.differences.run import compare

    comparison = compare(left, right, rollouts, seed)
    typer.echo(report_of(left, right, comparison))
