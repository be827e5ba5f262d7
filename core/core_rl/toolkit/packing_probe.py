"""A probe of a packed model, when its engine is built: outputs of a sequence must not depend on its neighbours.

The rules of `core_rl.toolkit.packed` know the layers of today; this probe covers unknown layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from core_rl.config.engine import DType, Head
from core_rl.data.batch import SequenceBatch
from core_rl.data.outputs import OutputName
from core_rl.errors import UnsupportedCapability
from core_rl.toolkit.packed import PackedModel
from core_rl.toolkit.positions import rotary_modules

__all__ = ["check_packing"]

SHORT, LONG = 7, 12
"""Tokens of the two sequences that are compared."""
BETWEEN, WINDOW = 8, 4
"""Lengths while the probe runs: the long sequence alone exceeds the first, and both exceed the window."""
THRESHOLDS = {
    "original_max_position_embeddings": BETWEEN,
    "original_max_seq_len": BETWEEN,
    "sliding_window": WINDOW,
}
"""Attributes of layers and fields of configs."""
TOLERANCE: dict[DType, float] = {"float32": 1e-4, "bfloat16": 0.05}
"""Allowed difference, relative to the largest value or 1. Equal rows of equal matrix products are equal: experts, whose
tokens are sorted, are all there is to tolerate (2e-6 in float32 on tiny mixtures of experts)."""

OUTPUT: dict[Head, OutputName] = {"lm": "logprobs", "value": "values", "reward": "scores"}


def check_packing(packed: PackedModel, dtype: DType) -> None:
    """Raise `UnsupportedCapability` where a sequence's outputs depend on its neighbours; collective.

    Two forward passes of 38 tokens without a graph. One has copies of a short sequence and three neighbours; the other
    copies of the short sequence and of a long one, which is longer than the model's `THRESHOLDS`, scaled down for the
    probe. All copies of a sequence get the same inputs, so they must get the same outputs.

    Args:
        packed: the model in evaluation mode, with its weights.
        dtype: the dtype in which it computes.
    """
    output = OUTPUT[packed.head]
    with small_thresholds(packed.model):
        groups = _copies(packed, output)
    error = max(float((copy - copies[0]).abs().max()) for copies in groups for copy in copies)
    allowed = TOLERANCE[dtype] * max(1.0, *(float(copies[0].abs().max()) for copies in groups))
    # Never true of NaN, which random weights of a wrong scale give: that is no leak.
    if error > allowed:
        config = packed.model.config
        raise UnsupportedCapability(
            f"the model type {config.model_type!r} cannot be packed: {output} of a sequence change by {error:.2g} with "
            f"the sequences next to it (allowed: {allowed:.2g}), so a layer of {type(packed.model).__name__} carries "
            "state across their boundary, or takes a length from the whole pack; choose another "
            "model, or the engine 'reference'"
        )


def _copies(packed: PackedModel, output: OutputName) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of all copies of the short and of the long sequence, in float32.

    Both passes have equally many tokens: matrix products of other shapes round otherwise.
    """
    known = _text_tokens(packed.model.config)
    short, long = (torch.arange(length) * 7919 + 3 for length in (SHORT, LONG))
    near = [torch.arange(SHORT + 1) * 104729 + 17 * number for number in (1, 2, 3)]
    first, second = (
        _outputs(packed, output, [known[ids % len(known)] for ids in sequences])
        for sequences in ([short, near[0], short, near[1], near[2]], [short, short, long, long])
    )
    return [first[0], first[2], second[0], second[1]], [second[2], second[3]]


def _text_tokens(config: PretrainedConfig) -> Tensor:
    """All token ids but placeholders, which stand for the features of an image or a video."""
    ids = torch.arange(int(config.get_text_config().vocab_size))
    names = ("image_token_id", "video_token_id")
    placeholders = [number for name in names if isinstance(number := getattr(config, name, None), int)]
    return ids[~torch.isin(ids, torch.tensor(placeholders, dtype=torch.long))]


def _outputs(packed: PackedModel, output: OutputName, sequences: Sequence[Tensor]) -> Sequence[Tensor]:
    """The outputs of each of ``sequences``, packed."""
    batch = SequenceBatch.from_sequences(sequences).to(_device(packed))
    with torch.no_grad():
        values: Tensor = packed(batch, (output,))[output].float()
    parts: Sequence[Tensor] = values.split(1 if output == "scores" else batch.lengths)
    return parts


@contextmanager
def small_thresholds(model: nn.Module) -> Iterator[None]:
    """Lower the lengths at which ``model`` computes otherwise to `THRESHOLDS` inside the context."""
    owners = [(owner, THRESHOLDS) for module in model.modules() for owner in _length_owners(module)]
    # The length beyond which `dynamic` scales. Learned positions have it as their number.
    owners += [
        (vars(module.config), {"max_position_embeddings": BETWEEN}) for module in rotary_modules(model)
    ]
    saved = []
    for owner, limits in owners:
        for name, limit in limits.items():
            if type(value := owner.get(name)) is int and value > limit:
                saved.append((owner, name, value))
                owner[name] = limit
    try:
        yield
    finally:
        for owner, name, value in saved:
            owner[name] = value


def _length_owners(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The attributes of ``module`` and of its config, and the rotary parameters there, for each layer type."""
    yield vars(module)
    if isinstance(config := getattr(module, "config", None), PretrainedConfig):
        yield vars(config)
        parameters = getattr(config, "rope_parameters", None) or {}
        yield parameters
        yield from (value for value in parameters.values() if isinstance(value, dict))


def _device(packed: PackedModel) -> torch.device:
    return next(packed.parameters()).device
