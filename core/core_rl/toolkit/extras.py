"""Packages that some fields of a config need, and that an extra of core-rl installs."""

from __future__ import annotations

import importlib
from typing import Any

from core_rl.errors import MissingPackage


def import_extra(module: str, need: str) -> Any:
    """The ``module``, whose first part is also the name of the extra.

    Raises `MissingPackage` where it cannot be imported; ``need`` begins its message.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = module.partition(".")[0]
        raise MissingPackage(
            f"{need}, which cannot be imported ({error}); run: pip install 'core-rl[{extra}]'"
        ) from error
