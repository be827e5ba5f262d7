"""Every mutant of the zoo."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

import mutants
from mutants.zoo import mutants_of

NEEDS_TORCHAO = "eight_bit"
MODULES = [module.name for module in iter_modules(mutants.__path__) if module.name != "all"]
MUTANTS = [
    mutant
    for name in MODULES
    if name != NEEDS_TORCHAO or find_spec("torchao")
    for mutant in mutants_of(import_module(f"mutants.{name}"))
]
