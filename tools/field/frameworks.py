"""The frameworks and rows of docs/field.md."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from field.peers.interface import Peer


@dataclass(frozen=True)
class Framework:
    """A column of the page."""

    distribution: str
    peer: str
    """Class of its module in `field.peers`."""
    report: str = ""
    """The report of its trainers, in docs/results."""

    def open(self) -> Peer:
        """A fresh peer; imports the framework."""
        module, _, name = self.peer.partition(":")
        peer: Peer = getattr(importlib.import_module(f"field.peers.{module}"), name)()
        return peer


FRAMEWORKS: Mapping[str, Framework] = {
    "verl": Framework("verl", "verl:VerlPeer", "trainers-verl.json"),
    "areal": Framework("areal", "areal:ArealPeer", "trainers-areal.json"),
    "trl": Framework("trl", "trl:TRLPeer", "trainers-trl.json"),
    "transformers": Framework("transformers", "transformers:TransformersPeer"),
    "core-rl": Framework("core-rl", "core_rl:CoreRLPeer", "trainer-core-rl.json"),
}
