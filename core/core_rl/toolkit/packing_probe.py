"""A probe of a packed model, when its engine is built: what one sequence gets must not depend on its neighbours.

The rules of `core_rl.toolkit.families` know the layers of today; this finds what they do not know.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core_rl.config.engine import DType, Head
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import OutputName
from core_rl.errors import UnsupportedCapability
from core_rl.toolkit.packed import PackedModel

__all__ = ["check_packing"]

LENGTHS = (7, 6, 7)
"""Tokens of a sequence, of a neighbour, and of the same sequence again."""
TOLERANCE: dict[DType, float] = {"float32": 1e-4, "bfloat16": 0.05}
"""Allowed difference, relative to the largest value or 1. Equal rows of equal matrix products are equal: experts, whose
tokens are sorted, are all there is to tolerate (2e-6 in float32 on tiny mixtures of experts)."""

OUTPUT: dict[Head, OutputName] = {"lm": "logprobs", "value": "values", "reward": "scores"}


def check_packing(packed: PackedModel, dtype: DType) -> None:
    """Raise `UnsupportedCapability` where a sequence's outputs depend on what it is packed with; collective.

    Two forward passes of 20 tokens without a graph: a sequence, a neighbour, and the sequence again; then the same
    with another neighbour. All four copies get the same inputs, so they must get the same outputs.

    Args:
        packed: the model in evaluation mode, with its weights.
        dtype: the dtype in which it computes.
    """
    output = OUTPUT[packed.head]
    copies = [copy for neighbour in (1, 2) for copy in _copies(packed, output, neighbour)]
    error = max(float((copy - copies[0]).abs().max()) for copy in copies)
    allowed = TOLERANCE[dtype] * max(1.0, float(copies[0].abs().max()))
    # Never true of NaN, which random weights of a wrong scale give: that is no leak.
    if error > allowed:
        config = packed.model.config
        raise UnsupportedCapability(
            f"the model type {config.model_type!r} cannot be packed: {output} of a sequence change by {error:.2g} with "
            f"the sequences next to it (allowed: {allowed:.2g}), so a layer of {type(packed.model).__name__} carries "
            "state across their boundary; choose another model, or the engine 'reference'"
        )


def _copies(packed: PackedModel, output: OutputName, neighbour: int) -> tuple[Tensor, Tensor]:
    """The outputs of the sequence before and after its neighbour, in float32."""
    vocabulary = int(packed.model.config.get_text_config().vocab_size)
    own, other = (torch.arange(length) for length in LENGTHS[:2])
    own, other = (own * 7919 + 3) % vocabulary, (other * 104729 + 17 * neighbour) % vocabulary
    batch = SequenceBatch.from_sequences([own, other, own])
    with torch.no_grad():
        found = packed(batch.to(_device(packed)), (output,))[output].float()
    if output == "scores":
        return found[0], found[2]
    first, _, last = found.split(LENGTHS)
    return first, last


def _device(packed: PackedModel) -> torch.device:
    return next(packed.parameters()).device
