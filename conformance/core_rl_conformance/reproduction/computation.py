"""`Computation`: model, sequences and quantity of expected values, as far as a script can compute them again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from core_rl_conformance.inputs.data import Ragged, Row
from core_rl_conformance.inputs.losses import (
    CheckLoss,
    OutputsLoss,
    RewardLoss,
    SequenceMeanLoss,
    TokenMeanLoss,
    ValueLoss,
)
from core_rl_conformance.inputs.tiny_models import TinyModel
from core_rl_conformance.profile import MIXTURES

LOSSES = (TokenMeanLoss, SequenceMeanLoss, OutputsLoss, ValueLoss, RewardLoss)
"""Losses that scripts can compute; not their subclasses."""
NO_SEQUENCES = Ragged(())
OUTPUTS = ("logprobs", "entropy", "logits", "values", "bootstrap", "scores")


class Output(NamedTuple):
    """An output of every sequence."""

    name: str
    temperature: float


class Weights(NamedTuple):
    """The drawn weights, or their names and shapes alone."""

    shapes_only: bool = False


Quantity = Output | CheckLoss | Weights


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Model, sequences and quantity: an output, the loss and its gradients, or the weights."""

    model: TinyModel
    data: Ragged
    quantity: Quantity


def computation_of(of: object, quantity: Quantity, data: Ragged = NO_SEQUENCES) -> Computation | None:
    """The computation; None where a short script cannot make the model, read the sequences or compute the quantity.

    Mixtures, vision-language models, adapters, weights of a directory and models for bfloat16 are out of reach.
    """
    if not isinstance(of, TinyModel) or of.vision or of.family in MIXTURES:
        return None
    if of.source or of.exact or of.focused or not (_computes(quantity) and all(map(_plain, data.rows))):
        return None
    return Computation(model=of, data=data, quantity=quantity)


def _computes(quantity: Quantity) -> bool:
    if isinstance(quantity, Output):
        return quantity.name in OUTPUTS
    return isinstance(quantity, Weights) or type(quantity) in LOSSES


def _plain(row: Row) -> bool:
    return row.routing is None and row.images is None and row.copies == 1
