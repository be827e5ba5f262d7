"""Files in half precision, several of them, configs of exports, and what a load, a save or a draw leaves behind."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from core_rl.backend.meta import SaveLoadMeta, StatePart, TensorKind
from core_rl.backend.tensors import NamedTensors, TensorSource
from core_rl.engine.components import Persistence
from core_rl.reference.train import ReferenceBackend
from mutants.bases import MOMENTS, OwnCheckpoint, OwnExport, OwnOffload, Replicated, TrainContext, inside
from mutants.zoo import DP2, Mutant


class _OfHalfFiles(ReferenceBackend):
    """Knows whether the files that it was built from are in bfloat16."""

    @property
    def half_files(self) -> bool:
        path = self.context.config.model.path
        return path is not None and '"bfloat16"' in (Path(path) / "config.json").read_text()


@Mutant(
    "I10.files", "masters in the dtype of the files", "weights after small steps built from bfloat16 files"
)
class RoundsWeightsToTheFiles(_OfHalfFiles):
    """Master weights have the dtype of the files after each step."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, count)
        if self.half_files:
            _round(list(self.model.parameters()))


@Mutant("I10.files", "moments in the dtype of the files", "first moments")
class RoundsMomentsToTheFiles(_OfHalfFiles):
    """First moments have the dtype of the files."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, lr, count)
        if self.half_files and self.optimizer is not None:
            _round([state["exp_avg"] for state in self.optimizer.state.values()])


@Mutant("I10.files", "frozen weights in the dtype of the files", "weights loaded from float16 files")
class HoldsFrozenAsInFiles(_OfHalfFiles):
    """Frozen weights keep the dtype of the files that they were built from, whatever is loaded later."""

    def after_load(self, kinds: frozenset[str]) -> None:
        super().after_load(kinds)
        if self.half_files:
            _round([parameter for parameter in self.model.parameters() if not parameter.requires_grad])


@torch.no_grad()
def _round(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.copy_(tensor.bfloat16().float())


def _index(directory: Path) -> dict[str, str]:
    """The file of each tensor; empty where there is one file."""
    index = directory / "model.safetensors.index.json"
    return json.loads(index.read_text())["weight_map"] if index.is_file() else {}


def _behind_first_file(directory: Path) -> list[str]:
    """Names of tensors outside the first of several files."""
    files = _index(directory)
    return [name for name, file in files.items() if file != min(files.values())]


@Mutant("I10.files", "an index that is not read", "weights built from bfloat16 files")
class BuildsFromTheFirstFile(ReferenceBackend):
    """Tensors outside the first of several files stay as they were drawn."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        path = context.config.model.path
        with torch.no_grad():
            behind = {*_behind_first_file(Path(path))} if path else set()
            for name, parameter in self.model.named_parameters():
                if {name, name.partition(".")[2]} & behind:
                    parameter.mul_(0.5)


@Mutant("I10.files", "names of a base model", "weights built from bfloat16 files")
class BuildsPrefixedNames(ReferenceBackend):
    """Tensors of several files whose names lack the prefix of the trunk stay as they were drawn."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        path = context.config.model.path
        names = _index(Path(path)) if path else {}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if names and name not in names:
                    parameter.mul_(0.5)


@Mutant("I10.files", "an index that is not read", "weights loaded from float16 files")
@inside(ReferenceBackend, "persistence")
class LoadsTheFirstFile(Persistence):
    """A load of several files leaves tensors outside the first one as they were."""

    def load(self, meta: SaveLoadMeta) -> None:
        backend = self.runtime.backend
        assert isinstance(backend, ReferenceBackend)
        names = _behind_first_file(Path(meta.path)) if meta.format == "hf" else []
        before = {name: backend.model.get_parameter(name).detach().clone() for name in names}
        super().load(meta)
        with torch.no_grad():
            for name, value in before.items():
                backend.model.get_parameter(name).copy_(value)


class _InBfloat16(TensorSource):
    """Tensors in float16 are cast to bfloat16."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def names(self) -> list[str]:
        return list(self._source.names())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def read(self, name: str, region: tuple[slice, ...] | None = None) -> Tensor:
        value = self._source.read(name, region)
        return value.bfloat16() if value.dtype == torch.float16 else value


@Mutant("I10.files", "half precision is bfloat16", "weights loaded from float16 files")
class CastsHalfFiles(OwnExport):
    """A load takes float16 files for bfloat16 ones."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        super().import_tensors(kind, _InBfloat16(source))


@Mutant("I10.export", "defaults of a config", "config.json of the export: .*rope_parameters is")
class ConfigOfItsClass(ReferenceBackend):
    """The exported config has the rotary base and the eps of its class."""

    def hf_config(self) -> PretrainedConfig:
        config = copy.deepcopy(super().hf_config())
        plain = type(config)()
        for name in ("rope_parameters", "rms_norm_eps", "layer_norm_epsilon"):
            if hasattr(config, name):
                setattr(config, name, getattr(plain, name))
        return config


@Mutant("I10.export", "one of several end tokens", "eos_token_id is 3, not")
class OneEndToken(ReferenceBackend):
    """The exported config has a single end token in place of several."""

    def hf_config(self) -> PretrainedConfig:
        config = copy.deepcopy(super().hf_config())
        if isinstance(config.eos_token_id, list):
            config.eos_token_id = config.eos_token_id[0]
        return config


@Mutant("I10.export", "positions of a config", "max_position_embeddings is 64, not 640")
class ShortPositions(ReferenceBackend):
    """The exported config has as many positions as the longest sequence so far."""

    def hf_config(self) -> PretrainedConfig:
        config = copy.deepcopy(super().hf_config())
        config.max_position_embeddings = min(64, config.max_position_embeddings)
        return config


@Mutant("I20.mode-changes", "frozen parameters at a load", "master after load")
class FrozenStayAtALoad(OwnExport):
    """A load of a model directory leaves frozen parameters as they were."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        before = [p.detach().clone() for p in frozen]
        super().import_tensors(kind, source)
        with torch.no_grad():
            for parameter, value in zip(frozen, before, strict=True):
                parameter.copy_(value)


@Mutant(
    "I20.mode-changes", "parameters trained after a save", r"of a step after forward.*save\(format='hf'\)"
)
@inside(ReferenceBackend, "persistence")
class UnfreezesAtASave(Persistence):
    """After a save, frozen parameters have gradients."""

    def save(self, meta: SaveLoadMeta) -> None:
        super().save(meta)
        backend = self.runtime.backend
        assert isinstance(backend, ReferenceBackend)
        backend.model.requires_grad_(True)


@Mutant("I20.mode-changes", "moments at a load of weights", "exp_avg after load")
class LoadsZeroMoments(ReferenceBackend):
    """A load of weights alone begins the moments again."""

    def after_load(self, kinds: frozenset[str]) -> None:
        super().after_load(kinds)
        if self.optimizer is not None and not kinds & {*MOMENTS}:
            for state in self.optimizer.state.values():
                for kind in MOMENTS:
                    state[kind].zero_()


@Mutant("I3.seeded-draws", "initializer of a head", "a model with a new reward head")
class RewardHeadTooLarge(ReferenceBackend):
    """A new reward head is 100 times too large."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        if context.config.model.head == "reward":
            with torch.no_grad():
                self.model.get_parameter("score.weight").mul_(100)


@Mutant(
    "I3.seeded-draws",
    "a seed for each rank",
    "rank 1 has other values than the exported ones: base_model.*lora_A",
    layout=DP2,
)
class AdapterOfEachRank(Replicated):
    """Each rank draws an adapter of its own next to a new head; the first rank's is exported."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        if context.config.model.head != "lm":
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    if "lora_A" in name:
                        parameter.mul_(1 + context.world.rank)


@Mutant("I6.layer-kinds", "persistent buffers", "buffers of gemma4_text")
class BuffersAreZero(OwnExport):
    """Buffers are exported as zeros."""

    def export_tensors(self, kind: str) -> NamedTensors:
        for name, value in super().export_tensors(kind):
            yield name, torch.zeros_like(value) if kind == "buffers" and value is not None else value


@Mutant("I6.layer-kinds", "persistent buffers", "buffers of gemma4_text after a load of a sharded checkpoint")
class BuffersNotInTheCheckpoint(OwnCheckpoint):
    """Sharded checkpoints hold no buffers."""

    def kinds(self, with_optimizer: bool) -> tuple[str, ...]:
        return tuple(kind for kind in super().kinds(with_optimizer) if kind != "buffers")


@Mutant("I6.layer-kinds", "persistent buffers", "buffers of gemma4_text after a load")
class BuffersNotLoaded(OwnExport):
    """A load leaves buffers as they are."""

    def import_tensors(self, kind: str, source: TensorSource) -> None:
        if kind != "buffers":
            super().import_tensors(kind, source)


@Mutant("I6.layer-kinds", "persistent buffers", r"buffers of gemma4_text after offload\(\) and onload\(\)")
class OnloadBringsFirstBuffers(OwnOffload):
    """Buffers come back from copies of the build."""

    def build(self, context: TrainContext) -> None:
        super().build(context)
        self._buffers = [part.tensor.clone() for part in self.state().local("buffers")]

    def onload(self, part: StatePart) -> None:
        super().onload(part)
        for buffer, first in zip(self.state().local("buffers"), self._buffers, strict=True):
            buffer.tensor.copy_(first)


@Mutant("I6.layer-kinds", "uploads of named_parameters()", "buffers sent by tensor of gemma4_text")
@inside(ReferenceBackend, "persistence")
class BuffersNotSent(Persistence):
    """Updates without a directory have parameters alone."""

    def _export(self, kinds: Sequence[TensorKind]) -> NamedTensors:
        return super()._export([kind for kind in kinds if kind != "buffers"])
