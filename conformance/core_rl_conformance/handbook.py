"""The checks as something to read: ``core-rl checks`` and ``docs/checks.md``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from core_rl.errors import ConfigError
from core_rl_conformance.catalogue import Check, natural_order, paragraphs_of

__all__ = ["checks_page", "chosen", "text_of"]

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
}
"""What the checks of one invariant show together."""


def chosen(checks: Mapping[str, Check], names: Sequence[str]) -> list[Check]:
    """The checks called ``names``, or whose names begin like them; all without names.

    Raises `ConfigError` for a name that no check has.
    """
    unknown = [name for name in names if not any(one.startswith(name) for one in checks)]
    if unknown:
        raise ConfigError(
            f"no check is called {', '.join(unknown)}; `core-rl checks` lists all {len(checks)}"
        )
    wanted = [check for name, check in checks.items() if not names or name.startswith(tuple(names))]
    return sorted(wanted, key=lambda check: natural_order(check.identifier))


def text_of(check: Check) -> str:
    """One check for a terminal."""
    return "\n".join(
        [f"{check.identifier} ({check.asks})", *(f"  {part}" for part in paragraphs_of(check.description))]
    )


def checks_page(checks: Iterable[Check]) -> str:
    """All checks as Markdown, under their invariants."""
    ordered = sorted(checks, key=lambda check: natural_order(check.identifier))
    parts = [HEAD, _table(ordered)]
    invariant = ""
    for check in ordered:
        own = check.identifier.partition(".")[0]
        if own != invariant:
            invariant = own
            title = INVARIANTS[own]
            parts.append(f"## {title}\n" if own == "contract" else f"## {own}: {title}\n")
        paragraphs = "\n\n".join(paragraphs_of(check.description))
        parts.append(f"### {check.identifier}\n\nFor {check.asks}.\n\n{paragraphs}\n")
    return "\n".join(parts)


def _table(checks: Iterable[Check]) -> str:
    """One line for each check, with a link to its entry."""
    rows = [f"| [{check.identifier}](#{check.anchor}) | {check.asks} | {check.title} |" for check in checks]
    return "\n".join(["| check | for | requirement |", "| --- | --- | --- |", *rows, ""])
