"""The checks as their sources describe them: ``core-rl checks`` shows them without importing torch."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from core_rl.config.capability import Capability
from core_rl_conformance import profile
from core_rl_conformance.catalogue import CHECKS_DIRECTORY, Check, check, check_of, declared_checks

__all__ = ["described_checks"]


def described_checks() -> list[Check]:
    """What `load_checks` finds, in the same order. Functions of the suite's own checks are not there to be called."""
    own = (found for file in sorted(CHECKS_DIRECTORY.glob("*.py")) for found in _checks_of(file))
    return [*own, *declared_checks()]


class _Names(dict[str, Any]):
    """What the decorators of a module refer to: the suite's words, and constants of the module."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(check=check, Capability=Capability)
        self._constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def __missing__(self, name: str) -> Any:
        if name in self._constants:
            return self.value(self._constants[name])
        if name in profile.__all__:
            return getattr(profile, name)
        raise KeyError(name)  # Python looks among its own names then

    def value(self, expression: ast.expr) -> Any:
        """Of an expression over these names."""
        code = compile(ast.Expression(expression), "<a check>", "eval")
        return eval(code, {}, self)  # noqa: S307  our own source, which an import would run as well


def _checks_of(file: Path) -> Iterator[Check]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = _Names(tree)
    for node in (part for part in tree.body if isinstance(part, ast.FunctionDef)):
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "check":
                mark: Callable[[Callable[..., None]], object] = names.value(decorator)
                found = check_of(mark(_undefined(ast.get_docstring(node) or "")))
                assert found is not None  # marked just now
                yield found


def _undefined(docstring: str) -> Callable[..., None]:
    def function(_: object) -> NoReturn:
        raise AssertionError("this check was read, not imported; load_checks() gives one that can be called")

    function.__doc__ = docstring
    return function
