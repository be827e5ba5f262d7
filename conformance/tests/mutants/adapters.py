"""Adapters: scales, what is trained, merging, switching off, files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core_rl.backend.meta import FinetuneSpec, SaveLoadMeta, TensorKind
from core_rl.backend.tensors import NamedTensors, TensorSource
from core_rl.distributed.process_group import RankAddress
from core_rl.reference.train import ReferenceEngine
from core_rl.state.snapshot import Shard
from core_rl.toolkit.held_tensors import HeldTensors
from core_rl.toolkit.lora import ADAPTER_PREFIX, adapter_disabled
from mutants.bases import Replicated
from mutants.zoo import DP2, Mutant

NAME = "default"


class AdaptedReference(ReferenceEngine):
    """The reference engine, with its adapter layers at hand."""

    def _layers(self) -> list[Any]:
        return [module for module in self.model.modules() if hasattr(module, "lora_A")]

    def _rescale(self) -> None:
        """Change the adapter after it was built."""

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        super()._build(addr, ft_spec)
        self._rescale()


class ScaleForgotten(AdaptedReference):
    """The product is added as it is."""

    def _rescale(self) -> None:
        for layer in self._layers():
            layer.scaling[NAME] = 1.0


class RankOverAlpha(AdaptedReference):
    """The scale is upside down."""

    def _rescale(self) -> None:
        for layer in self._layers():
            layer.scaling[NAME] = 1.0 / layer.scaling[NAME]


class RootForgotten(AdaptedReference):
    """Rank-stabilised adapters are scaled as others are."""

    def _rescale(self) -> None:
        lora = self.config.model.lora
        for layer in self._layers():
            assert lora is not None
            layer.scaling[NAME] = lora.alpha / lora.rank


class HalfTheFactors(AdaptedReference):
    """The factors compute in bfloat16 beside a float32 base."""

    def _rescale(self) -> None:
        for layer in self._layers():
            layer.lora_A[NAME].register_forward_hook(lambda module, args, out: out.bfloat16().float())


class AdapterLeftOn(AdaptedReference):
    """``disable_adapter`` does nothing."""

    def _adapter_disabled(self) -> AbstractContextManager[None]:
        return nullcontext()


class FirstLayerLeftOn(AdaptedReference):
    """Only some of the adapter layers are switched off."""

    @contextmanager
    def _adapter_disabled(self) -> Iterator[None]:
        with adapter_disabled(self.model):
            self._layers()[0]._disable_adapters = False
            yield


class StaysOffAfterAnError(AdaptedReference):
    """The adapter is switched on again at the end of the context, and not in a ``finally``."""

    @contextmanager
    def _adapter_disabled(self) -> Iterator[None]:
        for layer in self._layers():
            layer._disable_adapters = True
        yield
        for layer in self._layers():
            layer._disable_adapters = False

    def switch_adapter(self, on: bool) -> bool:
        self._switches = getattr(self, "_switches", 0) + 1
        if on and self._switches == 6:  # the third time, which ends by an error
            self._base_only = None
            return False
        return super().switch_adapter(on)


class AdapterDropoutInEval(AdaptedReference):
    """The adapter came after ``eval()``, and its dropout stays on."""

    def _set_training(self, training: bool) -> None:
        super()._set_training(training)
        for layer in self._layers():
            layer.lora_dropout.train(True)


class AdapterDropoutIgnored(AdaptedReference):
    """The dropout of the config does nothing."""

    def _set_training(self, training: bool) -> None:
        super()._set_training(training)
        for layer in self._layers():
            layer.lora_dropout.train(False)


class BaseTrainsAlong(AdaptedReference):
    """The base is not frozen."""

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        super()._build(addr, ft_spec)
        if self.config.model.lora:
            self.model.requires_grad_(True)
            self._adopt(self.model)


class OnlyBTrains(AdaptedReference):
    """``A`` stays as it was drawn."""

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        super()._build(addr, ft_spec)
        for layer in self._layers():
            layer.lora_A.requires_grad_(False)
        self._adopt(self.model)


class HeadFrozenWithTheBase(AdaptedReference):
    """All that is not the adapter's is frozen."""

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        super()._build(addr, ft_spec)
        if self.config.model.lora and self.config.model.head != "lm":
            self.model.get_parameter("score.weight").requires_grad_(False)
            self._adopt(self.model)


class BaseDecays(AdaptedReference):
    """Weight decay reaches weights that have no gradient."""

    def _step(self, scale: float) -> None:
        super()._step(scale)
        config = self.config.optimizer
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not parameter.requires_grad and parameter.dim() > 1 and config is not None:
                    parameter.mul_(1 - config.lr * config.weight_decay)


class RanksDrawTheirOwnAdapters(Replicated):
    """Each rank draws ``A`` from a seed of its own; one of them is exported."""

    def _build(self, addr: RankAddress, ft_spec: FinetuneSpec) -> None:
        super()._build(addr, ft_spec)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if ".lora_A." in name:
                    parameter.add_(0.1 * addr.rank)


class BaseWeightsSent(AdaptedReference):
    """The stream is read after the adapter was taken out again."""

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        return HeldTensors._full_tensors(self, "params")


class MergedInPlace(AdaptedReference):
    """The adapter is added to the base for the export, and subtracted after it."""

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        for layer in self._layers():
            layer.base_layer.weight.data += layer.get_delta_weight(NAME)
        yield from [(name, value.clone()) for name, value in HeldTensors._full_tensors(self, "params")]
        for layer in self._layers():
            layer.base_layer.weight.data -= layer.get_delta_weight(NAME)


class SquareWeightsNotTransposed(AdaptedReference):
    """GPT-2's weights are ``[in, out]``, and a square product fits either way."""

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        held = dict(self._full_tensors("master"))
        for name, value in super()._merged():
            product = self._products.get(name)
            if product is not None and product.transposed and value.shape[0] == value.shape[1]:
                yield name, held[name] + product.scaling * held[product.b] @ held[product.a]
            else:
                yield name, value


class TiedEmbeddingMerged(AdaptedReference):
    """A merge on the head changes the embedding, which is the same matrix."""

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        head = self.model.get_output_embeddings().weight
        for name, value in super()._merged():
            tied = name == "model.embed_tokens.weight" and head is self.model.get_input_embeddings().weight
            yield name, value + 0.01 if tied else value


class AdapterUnderPrivateNames(AdaptedReference):
    """The adapter's file has the names that the module has."""

    def _named_tensors(self, kind: TensorKind) -> NamedTensors:
        for name, value in super()._named_tensors(kind):
            private = name.replace(".weight", f".{NAME}.weight") if kind == "adapter" else name
            yield private, value


class AdapterSavedInHalf(AdaptedReference):
    """The adapter is saved in the compute dtype of servers."""

    def _named_tensors(self, kind: TensorKind) -> NamedTensors:
        for name, value in super()._named_tensors(kind):
            rounded = kind == "adapter" and value is not None
            yield name, value.bfloat16().float() if rounded and value is not None else value


class ScaleNotWritten(AdaptedReference):
    """``peft``'s default stands in the saved config."""

    def _adapter_config(self) -> dict[str, Any]:
        return super()._adapter_config() | {"lora_alpha": 8}


class OnlyBLoads(AdaptedReference):
    """A load of an adapter leaves ``A`` as it was drawn."""

    def _load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        kept = {name: p.detach().clone() for name, p in self.model.named_parameters() if ".lora_A." in name}
        super()._load_named_tensors(kind, source)
        with torch.no_grad():
            for name, value in kept.items() if kind == "adapter" else ():
                self.model.get_parameter(name).copy_(value)


class AdapterMomentsDropped(AdaptedReference):
    """Moments are looked up by the names of the base, where there are none."""

    def _shards(self, with_optimizer: bool) -> Iterator[Shard]:
        for shard in super()._shards(with_optimizer):
            kind, _, name = shard.name.partition("/")
            dropped = kind.startswith("exp_avg") and name.startswith(ADAPTER_PREFIX)
            tensor = torch.zeros_like(shard.tensor) if dropped else shard.tensor
            yield Shard(shard.name, tensor, shard.global_shape, shard.offsets)


class BaseNotInTheCheckpoint(AdaptedReference):
    """A checkpoint of what is trained goes on from the base that is there."""

    def _load_shards(self, directory: Path, with_optimizer: bool) -> None:
        frozen = {n: p.detach().clone() for n, p in self.model.named_parameters() if not p.requires_grad}
        super()._load_shards(directory, with_optimizer)
        with torch.no_grad():
            for name, value in frozen.items():
                self.model.get_parameter(name).copy_(value)


class OneRankLoadsTheAdapter(Replicated):
    """The first rank loads the adapter, and exports it; the others compute with the one that they drew."""

    def _load_named_tensors(self, kind: TensorKind, source: TensorSource) -> None:
        if kind != "adapter" or self.world.rank == 0:
            super()._load_named_tensors(kind, source)


class DigestOfARank(Replicated):
    """The digest of the base holds the number of ranks."""

    def _base_digest(self) -> str:
        return f"{super()._base_digest()} on {self.world.size}"


class LoadsAnyAdapter(AdaptedReference):
    """An overridden ``load`` reads the tensors and looks at nothing else."""

    def load(self, meta: SaveLoadMeta) -> None:
        from core_rl.checkpoint.tensor_files import TensorFiles

        if meta.format == "adapter":
            self.load_named_tensors("adapter", TensorFiles(Path(meta.path), "adapter_model"))
        else:
            super().load(meta)


class BaseOfAnAdapterNotCompared(AdaptedReference):
    """Every base model has the same digest."""

    def _base_digest(self) -> str:
        return "base"


MUTANTS = (
    Mutant(
        engine=ScaleForgotten,
        killed_by="I7.adapter-logprobs",
        issue="LoRA's scale",
        says="logprobs with an adapter .rslora: False. differs",
    ),
    Mutant(
        engine=RankOverAlpha,
        killed_by="I7.adapter-logprobs",
        issue="alpha and rank swapped",
        says="logprobs with an adapter .rslora: False. differs",
    ),
    Mutant(
        engine=RootForgotten,
        killed_by="I7.adapter-logprobs",
        issue="rank-stabilised scale",
        says="logprobs with an adapter .rslora: True. differs",
    ),
    Mutant(
        engine=HalfTheFactors,
        killed_by="I7.adapter-logprobs",
        issue="verl #6150",
        says="with an adapter",
    ),
    Mutant(
        engine=AdapterLeftOn,
        killed_by="I7.adapter-disabled",
        issue="reference policy with adapter",
        says="outputs inside disable_adapter",
    ),
    Mutant(
        engine=FirstLayerLeftOn,
        killed_by="I7.adapter-disabled",
        issue="reference policy with adapter",
        says="outputs inside disable_adapter",
    ),
    Mutant(
        engine=StaysOffAfterAnError,
        killed_by="I7.adapter-disabled",
        issue="context without finally",
        says="outputs after an error",
    ),
    Mutant(
        engine=AdapterDropoutInEval,
        killed_by="I9.adapter-dropout",
        issue="verl #4708",
        says="log-probs of two passes",
    ),
    Mutant(
        engine=AdapterDropoutIgnored,
        killed_by="I9.adapter-dropout",
        issue="options without effect",
        says="dropout does not act",
    ),
    Mutant(
        engine=BaseTrainsAlong,
        killed_by="I20.adapter-gradients",
        issue="base not frozen",
        says="the base model has gradients beside an adapter",
    ),
    Mutant(
        engine=OnlyBTrains,
        killed_by="I20.adapter-gradients",
        issue="verl #6913",
        says="missing: .*lora_A",
    ),
    Mutant(
        engine=HeadFrozenWithTheBase,
        killed_by="I20.adapter-head",
        issue="heads beside adapters",
        says="missing: score.weight",
    ),
    Mutant(
        engine=BaseDecays,
        killed_by="I20.adapter-steps",
        issue="decay of frozen weights",
        says="frozen weights with an adapter",
    ),
    Mutant(
        engine=RanksDrawTheirOwnAdapters,
        killed_by="I20.adapter-steps",
        issue="SkyRL #1725",
        says="after steps of the adapter",
        layout=DP2,
    ),
    Mutant(
        engine=BaseWeightsSent,
        killed_by="I12.adapter-merged",
        issue="verl #7014",
        says="merged weights",
    ),
    Mutant(
        engine=MergedInPlace,
        killed_by="I12.adapter-merged",
        issue="merge and unmerge",
        says="the base below the adapter",
    ),
    Mutant(
        engine=SquareWeightsNotTransposed,
        killed_by="I12.adapter-merged",
        issue="Conv1D",
        says="merged weights",
        family="gpt2",
    ),
    Mutant(
        engine=TiedEmbeddingMerged,
        killed_by="I12.adapter-merged",
        issue="peft #2018",
        says="exported weights without an adapter",
        family="qwen3",
    ),
    Mutant(
        engine=AdapterUnderPrivateNames,
        killed_by="I11.adapter-alone",
        issue="private names",
        says="the adapter's file: the tensors have other names",
    ),
    Mutant(
        engine=AdapterSavedInHalf,
        killed_by="I11.adapter-alone",
        issue="NeMo-RL #2372",
        says="the adapter's file",
    ),
    Mutant(
        engine=ScaleNotWritten,
        killed_by="I11.adapter-alone",
        issue="LoRA's scale",
        says="adapter_config.json has .*'lora_alpha': 8",
    ),
    Mutant(
        engine=OnlyBLoads,
        killed_by="I7.adapter-logprobs",
        issue="partial loads",
        says="with an adapter",
    ),
    Mutant(
        engine=AdapterMomentsDropped,
        killed_by="I11.adapter-resume",
        issue="AReaL #1468",
        says="exp_avg after the load",
    ),
    Mutant(
        engine=BaseNotInTheCheckpoint,
        killed_by="I11.adapter-resume",
        issue="frozen weights",
        says="master after the load of 'sharded'",
    ),
    Mutant(
        engine=OneRankLoadsTheAdapter,
        killed_by="I11.adapter-other-layout",
        issue="AReaL #1470",
        says="logprobs 'adapter' loaded on dp2",
    ),
    Mutant(
        engine=DigestOfARank,
        killed_by="I11.adapter-other-layout",
        issue="layouts in digests",
        says="another base model: the same architecture with other weights",
        layout=DP2,
    ),
    Mutant(
        engine=LoadsAnyAdapter,
        killed_by="contract.adapter",
        issue="adapters of another base",
        says="an adapter of another rank raised no CheckpointMismatch",
    ),
    Mutant(
        engine=BaseOfAnAdapterNotCompared,
        killed_by="contract.adapter",
        issue="adapters of another base",
        says="another base model raised no CheckpointMismatch",
    ),
)
