"""Vision towers: their attention and features, gradients and decay, exports, and placeholders."""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core_rl.backend.steps import MicroBatches, MicroBatchStep
from core_rl.backend.tensors import NamedTensors
from core_rl.data.batch import SequenceBatch
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.data.outputs import ModelOutput
from core_rl.engine import guards
from core_rl.engine.components import TrainComponents
from core_rl.engine.step import TrainStep
from mutants.bases import OwnExport, Packed, TrainContext
from mutants.images import QWEN, VISION
from mutants.zoo import Mutant

OfQwen = partial(Mutant, declared=VISION, family=QWEN)


class _Tower(Packed):
    """The tower of Qwen3-VL, for hooks."""

    @property
    def tower(self) -> nn.Module:
        """Gives ``pooler_output`` and ``deepstack_features``."""
        return self.model.get_submodule("model.visual")

    def verify(self) -> None:
        """Without the toolkit's probe, which has no images."""


class _BentFeatures(_Tower):
    """Features of images are changed behind the tower."""

    def build(self, context: TrainContext) -> None:
        super().build(context)

        def bend(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            output.pooler_output = self.bent(output.pooler_output)
            output.deepstack_features = [self.bent_level(level) for level in output.deepstack_features]

        self.tower.register_forward_hook(bend)

    def bent(self, features: Tensor) -> Tensor:
        """Instead of ``features [N, C]`` for the embeddings."""
        return features

    def bent_level(self, features: Tensor) -> Tensor:
        """Instead of ``features [N, C]`` for a layer of the text."""
        return self.bent(features)


@OfQwen(
    "I6.images",
    "a placeholder for the begin of an image that gets its first features",
    "log-probs of images in one pack",
)
class FeaturesOneLate(_BentFeatures):
    """Each placeholder gets the features before its own."""

    def bent(self, features: Tensor) -> Tensor:
        return features.roll(1, 0)


@OfQwen(
    "I6.images",
    "features of the tower's layers that a trunk of another library has no argument for",
    "log-probs of images in one pack",
)
class DeepstackDropped(_BentFeatures):
    """Layers of the text get no features of the tower's first layers."""

    def bent_level(self, features: Tensor) -> Tensor:
        return torch.zeros_like(features)


@OfQwen(
    "I1.images",
    "features that are computed ahead of the text, without a graph",
    "gradients .*with one sequence at a time",
)
class FeaturesDetached(_BentFeatures):
    """No gradient goes from the text into the merger and the tower."""

    def bent(self, features: Tensor) -> Tensor:
        return features.detach()


@OfQwen(
    "I20.frozen-tower",
    "a frozen tower under no_grad, with the merger inside of it",
    "gradients behind a frozen tower",
)
class FrozenTowerStopsMerger(_BentFeatures):
    """A tower whose first layer is frozen runs without gradients, and its merger with it."""

    def bent(self, features: Tensor) -> Tensor:
        trained = next(self.tower.parameters()).requires_grad
        return features if trained else features.detach()


@OfQwen("I6.images", "features that are kept by size (I6)", "log-probs of images")
class ImagesOfOneSizeAreEqual(_Tower):
    """In a micro-batch, images of one size have the pixels of the first."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        self.tower.register_forward_pre_hook(_first_of_each_size, with_kwargs=True)


def _first_of_each_size(
    _module: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    sizes = [tuple(size) for size in options["grid_thw"].tolist()]
    parts = args[0].split([math.prod(size) for size in sizes])
    first = dict(zip(sizes[::-1], parts[::-1], strict=True))
    return (torch.cat([first[size] for size in sizes]), *args[1:]), options


@OfQwen(
    "I6.images",
    "attention that is replaced for packed text, and for the tower with it",
    "log-probs of images in one pack",
)
class TowerSeesAllImages(_Tower):
    """Patches of a micro-batch attend to each other across images."""

    def build(self, context: TrainContext) -> None:
        super().build(context)

        def joined(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            bounds = kwargs["cu_seqlens"][[0, -1]]
            return args, {**kwargs, "cu_seqlens": bounds, "max_seqlen": int(bounds[-1])}

        for block in self.tower.get_submodule("blocks").children():
            block.register_forward_pre_hook(joined, with_kwargs=True)


@OfQwen(
    "I1.images",
    "a blank image for ranks without images that is trained on",
    "a batch without images gives .* gradients that are not 0",
)
class BlankImageCounts(_Tower):
    """The mean of a blank image's features is added to batches of text, with the factor 1 in place of 0."""

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        if micro_batch.media:
            return super().outputs(micro_batch, step)
        means: list[Tensor] = []

        def add(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, {**kwargs, "inputs_embeds": kwargs["inputs_embeds"] + means[-1]}

        hooks = (
            self.tower.register_forward_hook(lambda *call: means.append(call[2].pooler_output.mean())),
            self.model.get_decoder().register_forward_pre_hook(add, with_kwargs=True),
        )
        try:
            return super().outputs(micro_batch, step)
        finally:
            for hook in hooks:
                hook.remove()


@OfQwen("I20.frozen-tower", "frozen parameters in a group with weight decay", "the frozen tower")
class FrozenTowerDecays(_Tower):
    """Weight decay takes frozen parameters as well."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, count)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not parameter.requires_grad:
                    parameter.mul_(1 - 0.1 * lr)


@OfQwen("I10.export", "TRL #6028", "transformers reports while loading the export")
class ExportsTextAlone(OwnExport):
    """Named tensors are of the text model."""

    def export_tensors(self, kind: str) -> NamedTensors:
        for name, tensor in super().export_tensors(kind):
            if kind != "params" or "visual" not in name:
                yield name, tensor


class _CountsNoPlaceholders(TrainStep):
    """Batches are not checked for their images."""

    def cut(self, batch: SequenceBatch, mb_spec: MicroBatchSpec) -> MicroBatches:
        with patch.object(guards, "placeholder_violations", return_value=()):
            return super().cut(batch, mb_spec)


@OfQwen(
    "contract.placeholders", "features that are cut to the number of placeholders", "an image without pixels"
)
class FeaturesMadeToFit(_Tower):
    """Features are cut or padded to the number of placeholders, which is not checked."""

    components = TrainComponents(step=_CountsNoPlaceholders)

    def outputs(self, micro_batch: SequenceBatch, step: MicroBatchStep) -> ModelOutput:
        trunk: Any = self.model.base_model
        count = int((micro_batch.input_ids == self.model.config.image_token_id).sum())

        def fit(parts: tuple[Tensor, ...]) -> tuple[Tensor]:
            features = torch.cat(parts)
            return (F.pad(features, (0, 0, 0, count - len(features))),)

        def fitted(*arguments: Any, **options: Any) -> Any:
            features = type(trunk).get_image_features(trunk, *arguments, **options)
            features.pooler_output = fit(features.pooler_output)
            features.deepstack_features = [fit(level) for level in features.deepstack_features]
            return features

        trunk.get_image_features = fitted
        return super().outputs(micro_batch, step)
