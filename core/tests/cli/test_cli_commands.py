"""Commands of other distributions. They are real ones on disk: metadata, entry points and a module."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_support import run_command

Install = Callable[[str, str, str], None]
GREET = """
from typing import Annotated
import typer

def greet(name: str, loud: Annotated[bool, typer.Option("--loud", help="Shout.")] = False) -> None:
    '''Greet somebody.'''
    typer.echo(f"hello {name.upper() if loud else name}")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution with one command; its module goes afterwards."""
    monkeypatch.setenv("COLUMNS", "200")

    def _install(distribution: str, entry_points: str, source: str) -> None:
        module = distribution.replace("-", "_")
        info = tmp_path / distribution / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[core_rl_commands]\n{entry_points}\n", encoding="utf-8")
        (tmp_path / distribution / f"{module}.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path / distribution)

    before = set(sys.modules)
    yield _install
    for name in set(sys.modules) - before:
        if name.startswith(("alpha", "beta")):
            del sys.modules[name]


def test_installed_distribution_adds_command(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("alpha-commands", "greet = alpha_commands:greet", GREET)
    assert run_command("--help") == 0
    assert any("greet" in line and "Greet somebody." in line for line in capsys.readouterr().out.splitlines())
    assert run_command("greet", "ann", "--loud") == 0
    assert capsys.readouterr().out == "hello ANN\n"
    assert run_command("greet") == 2
    assert run_command("gret", "ann") == 2
    assert "Did you mean 'greet'" in capsys.readouterr().err


def test_core_commands_use_the_entry_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--help") == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in ("engines", "train", "report", "new-engine"))


BROKEN = [
    pytest.param("raise RuntimeError('boom')", "RuntimeError: boom", id="raises"),
    pytest.param("import no_such_backend", "no_such_backend", id="needs something"),
    pytest.param("", "greet", id="has no such function"),
    pytest.param("greet = 3", "is no function", id="is no function"),
]


@pytest.mark.parametrize(("source", "message"), BROKEN)
def test_broken_command_shows_its_reason(
    install: Install, capsys: pytest.CaptureFixture[str], source: str, message: str
) -> None:
    install("alpha-commands", "greet = alpha_commands:greet", source)
    install("beta-commands", "hail = beta_commands:greet", GREET)
    assert run_command("--help") == 0
    assert "(broken) command 'greet' of alpha-commands" in capsys.readouterr().out
    assert run_command("greet", "ann", "--loud") == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: command 'greet' of alpha-commands") and message in captured.err
    assert run_command("hail", "ann") == 0
    assert capsys.readouterr().out == "hello ann\n"


def test_command_conflict_names_both_distributions(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("alpha-commands", "greet = alpha_commands:greet", GREET)
    install("beta-commands", "greet = beta_commands:greet", GREET)
    assert run_command("greet", "ann") == 2
    err = capsys.readouterr().err
    assert "'greet' is claimed by" in err and "alpha-commands" in err and "beta-commands" in err


def test_a_built_in_command_cannot_be_replaced(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("alpha-commands", "engines = alpha_commands:greet", GREET)
    assert run_command("engines") == 0
    assert "hello" not in capsys.readouterr().out
    assert run_command("--help") == 0
    assert "Greet somebody." not in capsys.readouterr().out


def test_unreadable_entry_points_hide_no_command(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install("alpha-commands", "greet = alpha_commands:greet", GREET)
    install("beta-commands", "a line without an equals sign", GREET)
    assert run_command("greet", "ann") == 0
    assert capsys.readouterr().out == "hello ann\n"


@pytest.mark.parametrize("arguments", [["--help"], ["report", "--help"], ["new-engine", "--help"]])
def test_help_imports_neither_torch_nor_transformers(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom core_rl.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(*sorted(set(sys.modules) & {'torch', 'transformers', 'numpy', 'jinja2'}), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.split() == []


TUNE = """
from typing import Annotated
import typer

def tune(
    recipe: str,
    fields: Annotated[list[str] | None, typer.Argument(metavar="FIELD=VALUE")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
) -> None:
    typer.echo(f"{recipe} {fields}")
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--steps", "5"],
            "error: there is no option --steps; write a field of the recipe without dashes: steps=5",
        ),
        (["--optimizer.lr=1e-3"], "optimizer.lr=1e-3"),
        (["--optimizer.lr", "-1"], "optimizer.lr=-1"),
        (["--batch-size", "4"], "batch_size=4"),
        (["--dryrun", "4"], "No such option: --dryrun"),
        (["--steps"], "No such option: --steps"),
        (["--steps", "seed=3"], "No such option: --steps"),
    ],
)
def test_fields_as_options_are_hinted(
    install: Install, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    install("beta-commands", "tune = beta_commands:tune", TUNE)
    assert run_command("tune", "r.yaml", *arguments) == 2
    assert message in capsys.readouterr().err
    assert run_command("tune", "r.yaml", "steps=5", "--dry-run") == 0
    assert capsys.readouterr().out == "r.yaml ['steps=5']\n"
