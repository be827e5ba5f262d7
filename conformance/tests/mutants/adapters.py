"""Adapters: scales, training, merging, switching off, files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.meta import SaveLoadMeta
from core_rl.backend.protocols import LowRank
from core_rl.backend.tensors import NamedTensors, TensorSource
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.engine.components import Persistence
from core_rl.reference.train import ReferenceBackend
from core_rl.state.slices import Shard
from core_rl.state.store import TensorStore
from core_rl.toolkit.lora import ADAPTER_PREFIX
from mutants.bases import OwnCheckpoint, OwnExport, Replicated, TrainContext, inside
from mutants.unchanged import unchanged
from mutants.zoo import DP2, Mutant

NAME = "default"


class AdaptedReference(ReferenceBackend):
    """The reference backend, with its adapter layers at hand."""

    def layers(self) -> list[Any]:
        """The layers of ``peft``."""
        return [module for module in self.model.modules() if hasattr(module, "lora_A")]

    def rescale(self) -> None:
        """Change the adapter after it was built."""

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """The weights below the adapter."""
        return ((part.name, part.tensor) for part in self.state().local("params"))

    def build(self, context: TrainContext) -> None:
        super().build(context)
        self.rescale()


@Mutant("I7.adapter-logprobs", "LoRA's scale", "logprobs with an adapter .rslora: False. differs")
class ScaleForgotten(AdaptedReference):
    """The product is added as it is."""

    def rescale(self) -> None:
        for layer in self.layers():
            layer.scaling[NAME] = 1.0


@Mutant("I7.adapter-logprobs", "alpha and rank swapped", "logprobs with an adapter .rslora: False. differs")
class RankOverAlpha(AdaptedReference):
    """The scale is upside down."""

    def rescale(self) -> None:
        for layer in self.layers():
            layer.scaling[NAME] = 1.0 / layer.scaling[NAME]


@Mutant("I7.adapter-logprobs", "rank-stabilised scale", "logprobs with an adapter .rslora: True. differs")
class RootForgotten(AdaptedReference):
    """Rank-stabilised adapters are scaled as others are."""

    def rescale(self) -> None:
        lora = self.context.config.model.lora
        for layer in self.layers():
            assert lora is not None
            layer.scaling[NAME] = lora.alpha / lora.rank


@Mutant("I7.adapter-logprobs", "verl #6150", "with an adapter")
class HalfTheFactors(AdaptedReference):
    """The factors compute in bfloat16, the base in float32."""

    def rescale(self) -> None:
        for layer in self.layers():
            layer.lora_A[NAME].register_forward_hook(lambda module, args, out: out.bfloat16().float())


@Mutant("I20.adapter-modes", "reference policy with adapter", "outputs inside disable_adapter")
class AdapterLeftOn(AdaptedReference):
    """``disable_adapter`` does nothing."""

    def set_adapter(self, enabled: bool) -> None:
        """Nothing."""


@Mutant("I20.adapter-modes", "reference policy with adapter", "outputs inside disable_adapter")
class FirstLayerLeftOn(AdaptedReference):
    """Only some of the adapter layers are switched off."""

    def set_adapter(self, enabled: bool) -> None:
        super().set_adapter(enabled)
        self.layers()[0]._disable_adapters = False


@Mutant("I20.adapter-modes", "context without finally", "after an error inside .*\n.*\n.*not applied")
class StaysOffAfterAnError(AdaptedReference):
    """The adapter is switched on again at the end of the context, and not in a ``finally``."""

    switches = 0

    def set_adapter(self, enabled: bool) -> None:
        self.switches += 1
        if self.switches != 6:  # the third time, which ends by an error
            super().set_adapter(enabled)


@Mutant("I20.adapter-modes", "a switch by the scale", r"scale is alpha / rank, and not alpha / sqrt\(rank\)")
class SwitchForgetsTheRoot(AdaptedReference):
    """The adapter is switched on again without the root of a rank-stabilised scale."""

    def set_adapter(self, enabled: bool) -> None:
        super().set_adapter(enabled)
        for layer in self.layers():
            layer.scaling[NAME] = layer.lora_alpha[NAME] / layer.r[NAME]


@Mutant("I20.adapter-modes", "verl #4708", "dropout that is on")
class AdapterDropoutInEval(AdaptedReference):
    """The adapter came after ``eval()``, and its dropout stays on."""

    def set_training(self, training: bool) -> None:
        super().set_training(training)
        for layer in self.layers():
            layer.lora_dropout.train(True)


@Mutant("I20.adapter-modes", "options without effect", "dropout does not act")
class AdapterDropoutIgnored(AdaptedReference):
    """The dropout of the config does nothing."""

    def set_training(self, training: bool) -> None:
        super().set_training(training)
        for layer in self.layers():
            layer.lora_dropout.train(False)


@Mutant("I20.adapter-gradients", "base not frozen", "the base model has gradients next to an adapter")
class BaseTrainsAlong(AdaptedReference):
    """The base is not frozen."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        if context.config.model.lora:
            self.model.requires_grad_(True)
            self.adopt(self.model, context)


@Mutant("I20.adapter-gradients", "verl #6913", "missing: .*lora_A")
class OnlyBTrains(AdaptedReference):
    """``A`` stays as it was drawn."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        for layer in self.layers():
            layer.lora_A.requires_grad_(False)
        self.adopt(self.model, context)


@Mutant("I20.adapter-modes", "heads beside adapters", "score.weight")
class HeadFrozenWithTheBase(AdaptedReference):
    """Everything outside the adapter is frozen."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        if context.config.model.lora and context.config.model.head != "lm":
            self.model.get_parameter("score.weight").requires_grad_(False)
            self.adopt(self.model, context)


@Mutant("I20.adapter-steps", "decay of frozen weights", "frozen weights with an adapter")
class BaseDecays(AdaptedReference):
    """Weight decay reaches weights that have no gradient."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, count)
        config = self.context.config.optimizer
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not parameter.requires_grad and parameter.dim() > 1 and config is not None:
                    parameter.mul_(1 - config.lr * config.weight_decay)


@Mutant("I20.adapter-steps", "SkyRL #1725", "after steps of the adapter", layout=DP2)
class RanksDrawTheirOwnAdapters(Replicated):
    """Each rank draws ``A`` from a seed of its own; a single copy is exported."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if ".lora_A." in name:
                    parameter.add_(0.1 * context.world.rank)


@Mutant("I12.adapter-merged", "verl #7014", "merged weights")
class BaseWeightsSent(AdaptedReference, OwnExport):
    """The stream is read after the adapter was taken out again."""

    def export_tensors(self, kind: str) -> NamedTensors:
        yield from self.base() if kind == "params" else super().export_tensors(kind)


@Mutant("I12.adapter-merged", "merge and unmerge", "the base below the adapter")
class MergedInPlace(AdaptedReference, OwnExport):
    """The adapter is added to the base for the export, and subtracted after it."""

    def export_tensors(self, kind: str) -> NamedTensors:
        if kind != "params":
            yield from super().export_tensors(kind)
            return
        for layer in self.layers():
            layer.base_layer.weight.data += layer.get_delta_weight(NAME)
        yield from [(name, value.clone()) for name, value in self.base()]
        for layer in self.layers():
            layer.base_layer.weight.data -= layer.get_delta_weight(NAME)


@Mutant("I12.adapter-merged", "Conv1D", "merged weights", family="gpt2")
class SquareWeightsNotTransposed(AdaptedReference):
    """GPT-2's weights are ``[in, out]``, and a square product fits either way."""

    def low_rank(self) -> Mapping[str, LowRank]:
        shapes = self.state().shapes("params")
        return {
            name: replace(product, transposed=product.transposed and len({*shapes[name]}) == 2)
            for name, product in super().low_rank().items()
        }


@Mutant("I12.adapter-merged", "peft #2018", "exported weights without an adapter", family="qwen3")
class TiedEmbeddingMerged(AdaptedReference, OwnExport):
    """A merge on the head changes the embedding, which is the same matrix."""

    def export_tensors(self, kind: str) -> NamedTensors:
        merged = kind == "params" and self.layers() and self.model.config.tie_word_embeddings
        for name, value in super().export_tensors(kind):
            tied = merged and name == "model.embed_tokens.weight" and value is not None
            yield name, value + 0.01 if tied and value is not None else value


@Mutant("I11.adapter-alone", "private names", "the adapter's file: the tensors have other names")
class AdapterUnderPrivateNames(AdaptedReference, OwnExport):
    """The adapter's file has the names that the module has."""

    def export_tensors(self, kind: str) -> NamedTensors:
        for name, value in super().export_tensors(kind):
            private = name.replace(".weight", f".{NAME}.weight") if kind == "adapter" else name
            yield private, value


@Mutant("I11.adapter-alone", "NeMo-RL #2372", "the adapter's file")
class AdapterSavedInHalf(AdaptedReference, OwnExport):
    """The adapter is saved in the compute dtype of servers."""

    def export_tensors(self, kind: str) -> NamedTensors:
        for name, value in super().export_tensors(kind):
            rounded = kind == "adapter" and value is not None
            yield name, value.bfloat16().float() if rounded and value is not None else value


@Mutant("I11.adapter-alone", "LoRA's scale", "adapter_config.json has .*'lora_alpha': 8")
class ScaleNotWritten(AdaptedReference):
    """``peft``'s default stands in the saved config."""

    def adapter_config(self) -> dict[str, Any]:
        return super().adapter_config() | {"lora_alpha": 8}


@Mutant("I7.adapter-logprobs", "partial loads", "with an adapter")
class OnlyBLoads(AdaptedReference, OwnExport):
    """A load of an adapter leaves ``A`` as it was drawn."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        with unchanged(p for p in self.state().local("master") if kind == "adapter" and ".lora_A." in p.name):
            super().import_tensors(kind, source)


@Mutant("I11.adapter-resume", "AReaL #1468", "exp_avg after the load")
class AdapterMomentsDropped(AdaptedReference, OwnCheckpoint):
    """Moments are looked up by the names of the base, where there are none."""

    def shards(self, with_optimizer: bool) -> Iterator[Shard]:
        for shard in super().shards(with_optimizer):
            kind, _, name = shard.name.partition("/")
            dropped = kind.startswith("exp_avg") and name.startswith(ADAPTER_PREFIX)
            yield replace(shard, tensor=torch.zeros_like(shard.tensor)) if dropped else shard


@Mutant("I11.adapter-resume", "frozen weights", "master after the load of 'sharded'")
class BaseNotInTheCheckpoint(AdaptedReference, OwnCheckpoint):
    """A checkpoint of trained parameters leaves the base as it is."""

    def load_sharded(self, directory: Path, with_optimizer: bool) -> None:
        trained = self.state().shapes("grads")
        with unchanged(part for part in self.state().local("master") if part.name not in trained):
            super().load_sharded(directory, with_optimizer)


@Mutant("I11.adapter-other-layout", "AReaL #1470", "logprobs 'adapter' loaded on dp2")
class OneRankLoadsTheAdapter(OwnExport):
    """The first rank loads the adapter, and exports it; other ranks compute with their own draw."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        behind = kind == "adapter" and self.context.world.rank > 0
        with unchanged(part for part in self.state().local("adapter") if behind):
            super().import_tensors(kind, source)


@Mutant(
    "I11.adapter-other-layout",
    "layouts in digests",
    "another base model: the same architecture with other weights",
    layout=DP2,
)
@inside(Replicated, "tensors")
class DigestOfARank(TensorStore):
    """The digest of the base holds the number of ranks."""

    def base_digest(self) -> str:
        return f"{super().base_digest()} on {self.world.size}"


@Mutant(
    "contract.adapter", "adapters of another base", "an adapter of another rank raised no CheckpointMismatch"
)
@inside(ReferenceBackend, "persistence")
class LoadsAnyAdapter(Persistence):
    """Loading reads the tensors and looks at nothing else."""

    def load(self, meta: SaveLoadMeta) -> None:
        if meta.format == "adapter":
            self.load_named_tensors("adapter", TensorFiles(Path(meta.path), "adapter_model"))
        else:
            super().load(meta)


@Mutant("contract.adapter", "adapters of another base", "another base model raised no CheckpointMismatch")
@inside(ReferenceBackend, "tensors")
class BaseOfAnAdapterNotCompared(TensorStore):
    """Every base model has the same digest."""

    def base_digest(self) -> str:
        return "base"
