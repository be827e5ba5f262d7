"""Images of packed batches: transformers' vision tower in front of Megatron's layers.

Every tensor and context parallel rank computes the whole tower; the first pipeline stage has it. Its features go to
the places of their tokens, and the features of its own layers (Qwen3-VL) to the outputs of the text's first layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from core_rl.backend.tensors import TensorDict
from core_rl.data.batch import SequenceBatch
from core_rl.toolkit.meta_build import Unloaded
from core_rl.toolkit.parallel_context import TokenSlice
from core_rl.toolkit.vision import ImageFeatures, PackedVision
from core_rl_megatron.rotary import frequency_axes


class StageImages(nn.Module):
    """Positions of the tokens of ``model``, and on the first stage its ``tower``, whose weights have no values."""

    axes: Tensor

    def __init__(self, model: PreTrainedModel, *, tower: bool) -> None:
        super().__init__()
        with torch.device("meta"):
            trunk: PreTrainedModel = AutoModel.from_config(
                model.config, attn_implementation="sdpa", dtype=torch.float32
            )
        del trunk.language_model
        if not tower:
            del trunk.visual
        Unloaded(trunk, TensorDict({}), frozenset()).materialize(trunk, torch.device("cpu"))
        self.trunk = trunk
        self.register_buffer("axes", frequency_axes(model.config.get_text_config()), persistent=False)
        self._packed = PackedVision(self.trunk)

    def positions(self, batch: SequenceBatch, tokens: TokenSlice) -> Tensor:
        """The position, in time, height or width, that turns each rotary frequency: ``[L, D / 2]``."""
        positions = self._packed.positions(batch, tokens)
        grid = positions.expand(3, -1) if positions.dim() == 2 else positions[1:, 0]
        return grid[self.axes].T

    def features(self, batch: SequenceBatch, tokens: TokenSlice) -> ImageFeatures:
        """Run the tower, on a blank image where ``batch`` has none."""
        return self._packed.features(batch, tokens)


def level_count(model: PretrainedConfig) -> int:
    """Layers of the text to whose outputs ``model`` adds features."""
    vision = getattr(model, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def level_adder(level: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Forward hook of a layer that adds the features of ``level`` to its output.

    They come as Megatron's ``context``, which layers without cross-attention pass on: as an argument, they have their
    gradient where layers are computed again.
    """

    def add(
        _: nn.Module, _inputs: tuple[()], keywords: dict[str, Any], output: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        hidden, levels = output
        return hidden.index_add(0, keywords["packed_seq_params"].places, levels[level][:, None]), levels

    return add
