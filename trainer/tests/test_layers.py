"""The trainer stands on top: nothing imports it, and no other package has its dependencies."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BELOW = [
    ROOT / "core" / "core_rl",
    ROOT / "conformance" / "core_rl_conformance",
    ROOT / "conformance" / "core_rl_oracle",
    *sorted(ROOT.glob("plugins/*/src")),
    *sorted(ROOT.glob("examples/*/src")),
]
OF_THE_TRAINER = {"core_rl_trainer", "tensorboard", "matplotlib", "datasets", "wandb"}


def imported(path: Path) -> Iterator[str]:
    """The top packages of all imports in a module, also of those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("package", BELOW, ids=[str(path.relative_to(ROOT)) for path in BELOW])
def test_lower_packages_import_no_trainer_dependencies(package: Path) -> None:
    modules = sorted(package.rglob("*.py"))
    assert modules
    imports = {str(path.relative_to(ROOT)): OF_THE_TRAINER & set(imported(path)) for path in modules}
    assert {name: names for name, names in imports.items() if names} == {}
