"""Texts of configs that name files: `~` and variables are expanded and they are made absolute where a config is read.

Ranks may start in another directory, and a recipe is read again by another command.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BeforeValidator

HUB_ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\S+))?", re.ASCII)
VARIABLE = re.compile(r"\$(\w+|\{.*?\})")
FILE_REFERENCE = re.compile(r"(?P<file>.*\.py)(?P<attribute>:[\w.]+)", re.DOTALL)


def absolute_path(text: str) -> str:
    """``text`` from the root of the file system on, with ``~`` and ``$NAME`` expanded; URLs and nothing stay.

    Raises `ValueError` for a variable that is not set: configs add the field.
    """
    if not text or "://" in text:
        return text
    # pathlib would take "./~", a file of that name, for the home directory.
    path = Path(os.path.expandvars(os.path.expanduser(text))).absolute()  # noqa: PTH111
    if (variable := VARIABLE.search(str(path))) and not path.exists():
        raise ValueError(f"{variable[0]} is not set; set it, or write the path")
    return str(path)


def _hub_path(text: str) -> str:
    """An existing directory comes before a model or dataset of the Hub with its name."""
    path = absolute_path(text)
    return text if HUB_ID.fullmatch(text) and not Path(path).exists() else path


def _import_path(text: str) -> str:
    match = FILE_REFERENCE.fullmatch(text)
    return text if match is None else absolute_path(match["file"]) + match["attribute"]


def _refuse_object(value: Any) -> Any:
    """``value`` unless it is a function or a class, of which configs have the name."""
    if not callable(value):
        return value
    name = getattr(value, "__qualname__", type(value).__qualname__)
    module = getattr(value, "__module__", "__main__")
    raise ValueError(f"is an object; write its name, {'FILE.py' if module == '__main__' else module}:{name}")


def _program_path(text: str) -> str:
    return absolute_path(text) if "/" in text else text


def _nested_import_paths(value: Any) -> Any:
    """``value`` with the files of all its texts ``file.py:attribute``, in lists and dictionaries too."""
    if isinstance(value, dict):
        return {name: _nested_import_paths(field) for name, field in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_nested_import_paths, value))
    return _import_path(value) if isinstance(value, str) else value


LocalPath: TypeAlias = Annotated[str, AfterValidator(absolute_path)]
"""A file or a directory."""
HubPath: TypeAlias = Annotated[str, AfterValidator(_hub_path)]
"""A file, a directory, or an id of the Hugging Face Hub."""
ImportPath: TypeAlias = Annotated[str, BeforeValidator(_refuse_object), AfterValidator(_import_path)]
"""``module:attribute``, ``file.py:attribute``, or another name."""
ProgramPath: TypeAlias = Annotated[str, AfterValidator(_program_path)]
"""A file to run, or a name that is looked up in ``PATH``."""
NestedImportPaths: TypeAlias = Annotated[dict[str, Any], AfterValidator(_nested_import_paths)]
"""Settings of which texts may be an `ImportPath`; other paths among them are for their own config to type."""
