"""Descriptions of the checks, read from their sources without torch: ``core-rl checks`` and ``docs/checks.md``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from core_rl.config.capability import Capability
from core_rl.errors import ConfigError
from core_rl_conformance import profile
from core_rl_conformance.catalogue import (
    CHECKS_DIRECTORY,
    Check,
    check,
    check_of,
    declared_checks,
    natural_order,
    paragraphs_of,
)

HEAD = """# The checks

Every check of the conformance suite: its requirement, the real bug behind it, and where to look when it fails. `I7`
and the like are invariants that the field has learnt the hard way; `contract` are rules of the interface. A failure
names its check; `core-rl checks NAME` prints the same text in a terminal. `core-rl checks --markdown docs/checks.md`
writes this page.
"""
INVARIANTS = {
    "I1": "However a batch is cut into micro-batches, a step is the same",
    "I2": "However sequences fall on data-parallel ranks, a step is the same",
    "I3": "Every rank of every layout holds and computes one model",
    "I4": "The norm is that of the whole gradient, before clipping",
    "I5": "Gradients add up over calls, and evaluation leaves nothing behind",
    "I6": "Neighbours, padding and untrained tokens change nothing",
    "I7": "Every single token has its own log-prob, entropy and value",
    "I8": "Trainer and rollout mean the same distribution, at every temperature",
    "I9": "Dropout is off where nothing is trained, and on where it is",
    "I10": "Tied weights stay one, and exports load elsewhere",
    "I11": "A training that is interrupted or moved goes on as if it had not been",
    "I12": "What a weight sync delivers is what the trainer has",
    "I13": "No cache outlives an update",
    "I14": "Every token has the version of the weights that drew it",
    "I15": "An engine that has slept answers as before",
    "I16": "Ranks with little or nothing to do take part",
    "I17": "Replayed routing is the recorded one",
    "I18": "However a batch is cut, the balance of routers is the same",
    "I19": "Prompts go in as they are, and an end of sequence is a token like others",
    "I20": "Every parameter that should move does, as the optimizer says",
    "contract": "Rules of the interface",
    "T1": "A trainer's losses are the papers', at every cut",
    "T2": "So are the terms of KL, entropy and temperature",
    "T3": "Nothing that a trainer computes or reports depends on the cut or the spread",
    "T4": "Untrained tokens and sequences count nowhere in a trainer",
    "T5": "A trainer's advantages follow their rule",
    "T6": "A trainer's steps have the named rates, clipping and updates",
    "T7": "A resumed trainer goes on as if it had not stopped",
    "T8": "An epoch of a trainer has every sequence once",
}
"""Requirement that the checks of an invariant show together."""


def select_checks(checks: Mapping[str, Check], names: Sequence[str]) -> list[Check]:
    """The checks called ``names``, or whose names begin like them; all without names.

    Raises `ConfigError` for a name that no check has.
    """
    unknown = [name for name in names if not any(known.startswith(name) for known in checks)]
    if unknown:
        raise ConfigError(
            f"no check is called {', '.join(unknown)}; `core-rl checks` lists all {len(checks)}"
        )
    selected = [check for name, check in checks.items() if not names or name.startswith(tuple(names))]
    return sorted(selected, key=lambda check: natural_order(check.identifier))


def text_of(check: Check) -> str:
    """One check for a terminal."""
    return "\n".join(
        [f"{check.identifier} ({check.asks})", *(f"  {part}" for part in paragraphs_of(check.description))]
    )


def checks_page(checks: Iterable[Check]) -> str:
    """All checks as Markdown, under their invariants."""
    ordered = sorted(checks, key=lambda check: natural_order(check.identifier))
    rows = [f"| [{check.identifier}](#{check.anchor}) | {check.asks} | {check.title} |" for check in ordered]
    parts = [HEAD, "\n".join(["| check | for | requirement |", "| --- | --- | --- |", *rows, ""])]
    invariant = ""
    for entry in ordered:
        group = entry.identifier.partition(".")[0]
        if group != invariant:
            invariant = group
            title = INVARIANTS[group]
            parts.append(f"## {title}\n" if group == "contract" else f"## {group}: {title}\n")
        paragraphs = "\n\n".join(paragraphs_of(entry.description))
        parts.append(f"### {entry.identifier}\n\nFor {entry.asks}.\n\n{paragraphs}\n")
    return "\n".join(parts)


def described_checks() -> list[Check]:
    """Checks as in `load_checks`, in the same order. Functions of the suite's own checks are not there to be called."""
    suite_checks = (entry for file in sorted(CHECKS_DIRECTORY.glob("*.py")) for entry in _checks_of(file))
    return [*suite_checks, *declared_checks()]


class _Names(dict[str, Any]):
    """Names in the decorators of a module: the suite's words, and constants of the module."""

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
        """Value of an expression over these names."""
        code = compile(ast.Expression(expression), "<a check>", "eval")
        return eval(code, {}, self)  # noqa: S307  our own source, which an import would run as well


def _checks_of(file: Path) -> Iterator[Check]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = _Names(tree)
    for node in (part for part in tree.body if isinstance(part, ast.FunctionDef)):
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "check":
                mark: Callable[[Callable[..., None]], object] = names.value(decorator)
                check = check_of(mark(_undefined(ast.get_docstring(node) or "")))
                assert check is not None  # marked just now
                yield check


def _undefined(docstring: str) -> Callable[..., None]:
    def function(_: object) -> NoReturn:
        raise AssertionError("this check was read, not imported; load_checks() imports checks")

    function.__doc__ = docstring
    return function
