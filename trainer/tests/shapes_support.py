"""The example of shapes, as a module."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

PREPARE = Path(__file__).parents[2] / "examples" / "shapes" / "prepare.py"


@cache
def shapes() -> ModuleType:
    """``examples/shapes/prepare.py``."""
    spec = importlib.util.spec_from_file_location("shapes_prepare", PREPARE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
