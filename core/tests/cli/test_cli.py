"""The command line: output, streams and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_support import run_command
from distributions import write_distribution

from core_rl import __version__
from core_rl.config.capability import Capability
from core_rl.errors import ConfigError
from core_rl.registry.engines import register_engine
from core_rl.registry.spec import EngineSpec

GOOD = EngineSpec(
    name="alpha",
    kind="train",
    protocol=(0, 3),
    factory="backend_that_is_not_installed:Engine",
    config="core_rl.config.engine:TrainEngineConfig",
    capabilities=frozenset({Capability.MOE, Capability.LORA}),
    description="An engine [for tests].",
)


@pytest.fixture
def alpha(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "100")
    with register_engine(GOOD):
        yield


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points, files = {"rl_engines": {"beta": "beta_cli:SPEC"}}, {"beta_cli.py": "raise RuntimeError('boom')"}
    write_distribution(tmp_path, "beta-plugin", "3.2", points=points, files=files)
    monkeypatch.syspath_prepend(tmp_path)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--version") == 0
    assert capsys.readouterr().out == f"core-rl {__version__}\n"


def test_letters_outside_the_terminal_are_escaped() -> None:
    code = "from core_rl.cli import main\ntry: main(['--version'])\nfinally: print('\u27e6')"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    output = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert output.split()[-1] == "\\u27e6"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["engines", "--help"], ["engines", "show", "-h"], ["train", "-h"]]
)
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*arguments) == 0
    assert "Usage: core-rl" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["quux"], ["train"], ["engines", "show"], ["engines", "--quux"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*arguments) == 2
    assert "Usage: core-rl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("short", 2),
        ("x" * 1_000_000, 2),
        ("\n".join(f"line {number}: {'y' * 2000}" for number in range(1000)), 26),
    ],
)
def test_an_error_fits_on_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, lines: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        error = ConfigError(text)
        error.add_note("the same command resumes")
        error.add_note("Raised on rank 0:\n a traceback")
        raise error

    monkeypatch.setattr("core_rl.cli.build_app", lambda **_: fail)
    assert run_command("anything") == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == lines and printed[-1] == "the same command resumes"
    assert printed[0].startswith(f"error: {text[:20]}".splitlines()[0])
    assert max(map(len, printed)) < 1000


@pytest.mark.usefixtures("alpha", "broken")
def test_engines_lists_broken_engines_with_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("engines") == 0
    lines = capsys.readouterr().out.splitlines()
    good = next(line for line in lines if line.strip().startswith("alpha"))
    assert good.split()[-2:] == [f"2/{len(Capability)}", "ok"]
    bad = next(line for line in lines if line.strip().startswith("beta"))
    assert "beta-plugin 3.2" in bad
    assert bad.split()[-1] == "broken"
    assert "RuntimeError: boom" in "\n".join(lines)


@pytest.mark.usefixtures("alpha", "broken")
def test_engines_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("engines", "--json") == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["engines"]}
    assert listed["alpha"]["spec"]["capabilities"] == ["lora", "moe"]
    assert (listed["alpha"]["status"], listed["alpha"]["error"]) == ("ok", None)
    assert (listed["beta"]["status"], listed["beta"]["error"]["type"]) == ("broken", "EngineBroken")
    assert "boom" in listed["beta"]["error"]["message"]


@pytest.mark.usefixtures("broken")
def test_engines_strict_fails_for_broken_engine() -> None:
    assert run_command("engines", "--strict") == 1


@pytest.mark.usefixtures("alpha")
def test_show_prints_capabilities_and_fields_without_the_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("engines", "show", "alpha", "--no-check") == 0
    out = capsys.readouterr().out
    assert "An engine [for tests]." in out
    assert "supported: lora, moe" in out
    assert "optimizer.schedule.min_lr_ratio  float (>= 0.0, <= 1.0)  default 0.0" in out
    assert "optimizer  section | null  default as below" in out
    assert "model  section  required" in out


@pytest.mark.usefixtures("alpha")
def test_show_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("engines", "show", "alpha", "--json", "--no-check") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["capabilities"] == ["lora", "moe"]
    fields = {field["name"]: field for field in shown["fields"]}
    assert fields["optimizer.lr"]["default"] == 1e-5
    assert fields["model"]["required"]


def test_show_of_an_unknown_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("engines", "show", "quux") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: no installed engine is called 'quux'")


IMPORTS = """
import sys
from core_rl.cli import main
try:
    main({arguments!r})
except SystemExit as end:
    assert not end.code, end.code
found = set(sys.modules) & {heavy!r}
print(*sorted(found), file=sys.stderr)
"""
HEAVY = {"torch", "transformers", "numpy", "safetensors", "fsspec", "matplotlib", "pytest", "hypothesis"}


@pytest.mark.parametrize(
    "arguments", [["engines"], ["engines", "--json"], ["engines", "show", "reference", "--no-check"]]
)
def test_engines_command_imports_nothing_heavy(arguments: list[str]) -> None:
    code = IMPORTS.format(arguments=arguments, heavy=HEAVY)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.split() == []
