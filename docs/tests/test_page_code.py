"""The code on the pages runs as written: files first, then shell commands, then all Python of a page as one script."""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cli_support
import pytest
import torch
from distributions import install_project
from page_blocks import PAGES, ROOT, Block, blocks_of, commands_of, name_of
from page_stand_ins import write_arithmetic_start, write_tiny_model

RUNNABLE = ("python", "sh")
WITH_CODE = [
    page
    for page in PAGES
    if any(block.language in RUNNABLE and block.reason is None for block in blocks_of(page))
]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a tiny model stands under every path that the pages name."""
    directory = tmp_path_factory.mktemp("stand-ins")
    write_tiny_model(directory / "Qwen" / "Qwen3-0.6B")
    write_arithmetic_start(directory / "runs" / "arithmetic" / "start")
    return directory


@pytest.fixture
def workspace(stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(stand_ins, tmp_path, dirs_exist_ok=True)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:  # no later test of this process finds modules of the page
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_code_of_a_page_runs(page: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block for block in blocks_of(page) if block.reason is None]
    for block in blocks:
        if block.title is not None and not block.is_part:
            write_file(block, workspace)
    for block in blocks:
        if block.language == "sh":
            for command in commands_of(block):
                run_command(command, workspace, monkeypatch)
    for block in blocks:
        if block.title is not None and block.is_part:
            text = (workspace / block.title).read_text(encoding="utf-8")
            assert without_indents(block.code) in without_indents(text)
    run_script(page, [b for b in blocks if b.language == "python" and b.title is None], workspace)


def without_indents(text: str) -> str:
    return "\n".join(map(str.strip, text.splitlines()))


def write_file(block: Block, workspace: Path) -> None:
    assert block.title is not None
    path = workspace / block.title
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.code, encoding="utf-8")


def run_command(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = shlex.split(command)
    if program == "core-rl":
        assert cli_support.run_command(*arguments) == 0, command
    elif program == "pytest":
        pytest_command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        result = subprocess.run(pytest_command, cwd=workspace, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    elif [program, *arguments[:2]] == ["pip", "install", "-e"]:
        project = workspace / arguments[2].partition("[")[0]  # without its extras
        for path in reversed(install_project(project, project / "site")):
            monkeypatch.syspath_prepend(path)
            monkeypatch.setenv("PYTHONPATH", path, prepend=os.pathsep)
    else:
        pytest.fail(f"no test runs {command!r}: put <!-- not run: REASON --> above the block")


def run_script(page: Path, blocks: list[Block], workspace: Path) -> None:
    """Run ``blocks`` in one namespace, with the line numbers of the page, as ``python script.py`` would."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.code.splitlines()
    script = workspace / f"{page.stem.replace('-', '_')}.py"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_grad_enabled(True)


def test_failing_block_names_page_line(workspace: Path) -> None:
    page = workspace / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\ntext\n\n```python\nx / 0\n```\n", encoding="utf-8")
    with pytest.raises(ZeroDivisionError) as caught:
        run_script(page, blocks_of(page), workspace)
    assert caught.traceback[-1].lineno + 1 == 10


def test_untested_command_needs_a_reason(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.fail.Exception, match="not run: REASON"):
        run_command("nox -s quickstart", workspace, monkeypatch)
