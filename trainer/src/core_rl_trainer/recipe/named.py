"""Functions that a recipe names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from core_rl.errors import ConfigError

__all__ = ["load_named"]


def load_named(field: str, name: str) -> Any:
    """The callable that ``module:name`` or ``path/file.py:name``, the value of ``field``, stands for.

    Raises `ConfigError` if there is none.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{field} = {name!r}; write 'module:function' or 'path/file.py:function'")
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else _load_module(module_name)
    except (ImportError, OSError, SyntaxError) as error:
        raise ConfigError(f"{field} = {name!r}: {module_name!r} cannot be imported: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        known = sorted(n for n, value in vars(module).items() if inspect.isroutine(value) and n[0] != "_")
        raise ConfigError(
            f"{field} = {name!r}: there is no function {attribute!r}; it has {', '.join(known)}"
        )
    return found


def _load_module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Known by name, as an import would leave it: dataclasses and pickle look their module up.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
