"""Names that a package imports on first use (PEP 562): the imports under ``if TYPE_CHECKING`` in its source."""

from __future__ import annotations

import ast
import inspect
import sys
from importlib import import_module


def lazy_names(package: str) -> dict[str, str]:
    """The module of each such name of ``package``, which is being imported."""
    tree = ast.parse(inspect.getsource(sys.modules[package]))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def load_name(package: str, modules: dict[str, str], name: str) -> object:
    """The attribute ``name`` of ``package``, one of its `lazy_names`; raises ``AttributeError`` for any other."""
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(import_module(modules[name]), name)
