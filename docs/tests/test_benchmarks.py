"""Every command that docs/benchmarks.md and the scripts print runs, at tiny sizes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import DOCS, ROOT
from page_stand_ins import write_arithmetic_start

SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
COMMAND = re.compile(
    rf"(?:`|^ +)(?:python benchmarks/)?((?:{'|'.join(path.stem for path in SCRIPTS)})\.py\b[^`\n]*)",
    re.MULTILINE,
)
COMMANDS = sorted(
    {
        match[1]
        for path in (DOCS / "benchmarks.md", *SCRIPTS)
        for match in COMMAND.finditer(path.read_text(encoding="utf-8"))
    }
)


def test_every_benchmark_is_on_the_page() -> None:
    assert {command.split()[0] for command in COMMANDS} == {path.name for path in SCRIPTS}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which tiny models and rows stand where the recipes look for them."""
    directory = tmp_path_factory.mktemp("starts")
    arithmetic, real = directory / "runs/arithmetic/start", directory / "runs/smollm2/start"
    write_arithmetic_start(arithmetic)
    shutil.copytree(arithmetic, real)
    for name, copy in {"train": "products", "eval": "products_eval"}.items():
        (real / f"{name}.jsonl").rename(real / f"{copy}.jsonl")
    (directory / "examples").symlink_to(ROOT / "examples")
    return directory


@pytest.mark.sampled(8)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_printed_command_rehearses(command: str, starts: Path) -> None:
    script, *options = shlex.split(command)
    words = [sys.executable, str(ROOT / "benchmarks" / script), *options, "--rehearse"]
    result = subprocess.run(words, cwd=starts, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
