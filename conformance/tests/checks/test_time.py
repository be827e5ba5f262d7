"""No verdict of the suite hangs on time: neither a check nor a mutant sleeps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from core_rl_conformance.catalogue import CHECKS_DIRECTORY

FILES = [*CHECKS_DIRECTORY.parent.rglob("*.py"), *(Path(__file__).parents[1] / "mutants").rglob("*.py")]


def _sleeps(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of ``sleep``, except for 0 seconds, which let other tasks run."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "sleep" and ast.unparse(node.args[0]) != "0":
            yield node


@pytest.mark.parametrize("source", ["time.sleep(0.5)", "await asyncio.sleep(APART_S)", "sleep(1)"])
def test_a_sleep_is_found(source: str) -> None:
    assert list(_sleeps(ast.parse(source)))


def test_neither_checks_nor_mutants_sleep() -> None:
    assert len(FILES) > 100
    sleeps = [
        f"{file.name}:{call.lineno}"
        for file in FILES
        for call in _sleeps(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert sleeps == []
