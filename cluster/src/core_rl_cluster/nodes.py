"""Nodes and resources of a Ray cluster in messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def shortage(
    nodes: Sequence[Mapping[str, Any]],
    free: Mapping[str, float],
    machines: int,
    bundle: Mapping[str, float],
    wait_s: float,
) -> str:
    """A message about a cluster without ``machines`` nodes that have the resources of ``bundle`` free.

    ``nodes`` come from ``ray.nodes()``, and ``free`` from ``ray.available_resources()``.
    """
    large = sum(node["Alive"] and not _lacks(node, bundle) for node in nodes)
    if large < machines:
        cause = f"{large} are large enough: add nodes, or ask for fewer machines or resources"
    else:
        cause = (
            f"{large} are large enough, and others use them: {amounts(_of(free, bundle))} are free in all. End "
            "other jobs, or wait longer (wait_s)"
        )
    lines = [_line(node, bundle) for node in sorted(nodes, key=lambda node: str(node["NodeManagerAddress"]))]
    head = f"Ray did not give {machines} nodes with {amounts(bundle)} each within {wait_s:g} s"
    return "\n".join([f"{head}. Of {len(nodes)} nodes {cause}", *lines])


def amounts(resources: Mapping[str, float]) -> str:
    """``resources`` as text."""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items()) or "nothing"


def _line(node: Mapping[str, Any], bundle: Mapping[str, float]) -> str:
    lacks = _lacks(node, bundle)
    state = "is not alive" if not node["Alive"] else f"lacks {amounts(lacks)}" if lacks else "is large enough"
    name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    return f"  {name} {state}: {amounts(_of(node['Resources'], bundle))}"


def _lacks(node: Mapping[str, Any], bundle: Mapping[str, float]) -> dict[str, float]:
    """Return the resources that ``node`` lacks even when it is idle."""
    total = _of(node["Resources"], bundle)
    return {name: amount - total[name] for name, amount in bundle.items() if total[name] < amount}


def _of(resources: Mapping[str, float], bundle: Mapping[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in bundle}
