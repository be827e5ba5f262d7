"""Plain values, as YAML has them, of a recipe that Python code builds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any

from pydantic import BaseModel

from core_rl.config.secret import SecretReference

__all__ = ["plain_values"]


def plain_values(value: Any) -> Any:
    """``value`` with sections as mappings, paths as text, and NumPy's numbers as Python's, at any depth."""
    plain = value
    if isinstance(value, BaseModel):
        plain = value.model_dump(mode="json", exclude_unset=True)
    elif isinstance(value, SecretReference | os.PathLike):
        plain = str(value)
    elif is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: plain_values(getattr(value, field.name)) for field in fields(value)}
    elif isinstance(value, Mapping):
        plain = {name: plain_values(item) for name, item in value.items()}
    elif isinstance(value, list | tuple):
        plain = [plain_values(item) for item in value]
    elif isinstance(value, Real) and not isinstance(value, bool):
        plain = int(value) if isinstance(value, Integral) else float(value)
    return plain
