"""The public names of the package: all resolve, nothing else is exported, and none costs an import."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import core_rl
from core_rl import errors

HEAVY = ("torch", "transformers", "numpy", "pydantic")


@pytest.mark.parametrize("name", core_rl.__all__)
def test_every_exported_name_resolves(name: str) -> None:
    actual = getattr(core_rl, name)
    if name in core_rl._HOMES:
        assert actual is getattr(importlib.import_module(core_rl._HOMES[name]), name)


def test_no_name_is_exported_twice() -> None:
    assert len(core_rl.__all__) == len(set(core_rl.__all__))


def test_dir_lists_exactly_the_exported_names() -> None:
    assert dir(core_rl) == sorted(core_rl.__all__)


def test_type_checkers_see_the_lazy_names() -> None:
    tree = ast.parse(Path(core_rl.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (alias.asname, node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(core_rl._HOMES.items())


def test_every_error_is_exported() -> None:
    tree = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert tree <= set(core_rl.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'FSDPEngine'"):
        _ = core_rl.FSDPEngine


@pytest.mark.parametrize("statement", ["import core_rl", "from core_rl import get_spec, EngineError"])
def test_importing_loads_nothing_heavy(statement: str) -> None:
    code = f"import sys; {statement}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_checkpoint_formats_import_dcp_when_used() -> None:
    code = "import sys, core_rl.checkpoint.formats; print('torch.distributed.checkpoint' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False"]
