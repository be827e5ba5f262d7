"""Building a model on the meta device, so that each rank later reads only the parts of its weights that it holds.

`build_on_meta` makes the module without memory and checks that the files fit it. The engine then
shards it, gives its shards memory (`Unloaded.materialize`) and reads them (`Unloaded.source`). At no
time does a rank hold all of a model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from core_rl.backend.tensors import MappedSource, TensorDict, TensorSource
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.config.engine import ModelConfig
from core_rl.distributed.comm import Comm
from core_rl.errors import ConfigError
from core_rl.state.store import digest_of_parts
from core_rl.toolkit.build import (
    ExpertsKernel,
    attention_of,
    buildable_config,
    building,
    drawn_head,
    finished,
    is_new_head,
    model_family,
    require_fitting,
)
from core_rl.toolkit.checkpoint_layout import CheckpointLayout
from core_rl.toolkit.lora import checkpoint_name, fresh_adapter
from core_rl.toolkit.model_files import model_files, name_as_in_files, unread_names

__all__ = ["Unloaded", "build_on_meta", "digest_of_directory", "model_on_meta"]

COMPARED_BYTES = 16 * 2**20
"""Two tensors are compared in pieces of about this size, in bytes."""


class Unloaded:
    """A model on the meta device, and the files with its weights."""

    def __init__(self, model: PreTrainedModel, source: TensorSource, half: frozenset[str]) -> None:
        self.model = model
        self.source = source
        """All parameters and persistent buffers under the names that transformers writes."""
        self._half = half
        self._computed = _computed_buffers(model)

    def hold_frozen_as_in_files(self) -> None:
        """Hold frozen parameters in bfloat16 that the files hold in it: no bit is lost, and half of the memory.

        For an engine that computes in bfloat16: a later load of float32 files rounds to it, as each pass would.
        """
        for name, parameter in self.model.named_parameters():
            if checkpoint_name(name) in self._half and not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()

    def materialize(self, root: nn.Module, device: torch.device) -> None:
        """Give all of ``root``, which holds the model, memory on ``device``; parameters are not initialized.

        The parameters may have been sharded. Tied ones stay tied. Buffers that no file holds get the
        values that the model computes for them, in its own dtype: rotary frequencies stay float32.
        """
        tied = _tied_names(root)
        root.to_empty(device=device)
        for first, *aliases in tied:
            for alias in aliases:
                owner, _, last = alias.rpartition(".")
                root.get_submodule(owner).register_parameter(last, root.get_parameter(first))
        for module, name, value in self._computed:
            module._buffers[name] = value.to(device)


def model_on_meta(model: ModelConfig) -> PreTrainedModel:
    """The module of ``model``, its adapter and head included, without memory; raises `ConfigError` as `build_model`."""
    config = buildable_config(model)
    with building(model), torch.device("meta"):
        built: PreTrainedModel = model_family(model).from_config(config, dtype=torch.float32)
    return finished(built, model, seed=0, experts="eager")


def build_on_meta(
    model: ModelConfig, *, seed: int, attn_implementation: str, experts: ExpertsKernel = "eager"
) -> Unloaded | None:
    """The model of ``model.path`` without memory, in evaluation mode; None where `build_model` must load it.

    That is so for weights drawn from a config, and files whose tensors transformers renames by more than a prefix. A
    new adapter is drawn from ``seed`` as well.

    A new head is drawn from ``seed``, the same on every rank. Raises `ConfigError` for missing, misshapen,
    unreadable or pickled weights.
    """
    if model.path is None:
        return None
    files = model_files(model)
    config = buildable_config(model)
    if getattr(config, "quantization_config", None) is not None:
        return None
    with building(model), torch.device("meta"):
        built: PreTrainedModel = model_family(model).from_config(
            config, attn_implementation=attention_of(config, attn_implementation), dtype=torch.float32
        )
    name_as_in_files(built, files)
    built = finished(built, model, seed=seed, experts=experts)
    source = _source(built, model, files, seed)
    return None if source is None else Unloaded(built, *source)


def _source(
    built: PreTrainedModel, model: ModelConfig, files: TensorFiles, seed: int
) -> tuple[TensorSource, frozenset[str]] | None:
    """Source of each tensor of ``built``, and the parameters that are in bfloat16 there; None where only transformers
    knows how the files are to be read.
    """
    adapter = fresh_adapter(built, seed)
    shapes = {checkpoint_name(name): tuple(parameter.shape) for name, parameter in built.named_parameters()}
    base = {name: shape for name, shape in shapes.items() if name not in adapter}
    layout = CheckpointLayout.of(built, base)
    buffers = {name: tuple(b.shape) for name, b in built.named_buffers() if name in built.state_dict()}
    required = layout.shapes(base) | buffers
    tied_names = ([*map(checkpoint_name, one)] for one in _tied_names(built))
    tied = {written: aliases for first, *aliases in tied_names for written in layout.names(first)}
    present = set(files.names())
    located = {name: place for name in required if (place := _find(built, name, tied, present)) is not None}
    missing = [name for name in required if name not in located and not is_new_head(model, name)]
    known = {*located.values(), *(name for names in tied.values() for name in names)}
    unknown = sorted(present - known)
    if missing and (
        len(unknown) > len(unread_names(built, unknown)) or built._keys_to_ignore_on_load_missing
    ):
        return None
    misshapen = [name for name, place in located.items() if files.shape(place) != required[name]]
    require_fitting(model, missing, misshapen)
    for source, names in tied.items():
        if any(name in present and not _equal(files, located[source], name) for name in names):
            # transformers does not tie them then, and servers do.
            raise ConfigError(
                f"the weights in {model.path!r} do not fit their config: {' and '.join((source, *names))} differ, and "
                "tie_word_embeddings is true; set it to false in config.json, or remove the tensor that is not used"
            )
    drawn = {name: drawn_head(built, seed) for name in required if name not in located}
    bfloat16 = {name for name, place in located.items() if files.is_bfloat16(place)}
    half = frozenset(name for name in base if bfloat16.issuperset(layout.names(name)))
    return _JoinedSources(MappedSource(files, located), TensorDict(drawn | adapter)), half


def _find(
    built: PreTrainedModel, name: str, tied: Mapping[str, list[str]], present: Collection[str]
) -> str | None:
    """The name, among those ``present`` in the files, that stands for ``name``.

    It is its own, without the prefix of the trunk, or one tied to it.
    """
    candidates = [name, name.removeprefix(f"{built.base_model_prefix}."), *tied.get(name, ())]
    return next((candidate for candidate in candidates if candidate in present), None)


def _tied_names(root: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def _equal(files: TensorFiles, left: str, right: str) -> bool:
    """Whether two tensors hold the same numbers, read in pieces."""
    if left == right:
        return True
    shape = files.shape(left)
    if files.shape(right) != shape:
        return False
    if not shape:
        return torch.equal(files.read(left), files.read(right))
    rows = max(1, COMPARED_BYTES // max(1, 4 * torch.Size(shape[1:]).numel()))
    pieces = [(slice(start, start + rows),) for start in range(0, shape[0], rows)]
    return all(torch.equal(files.read(left, piece), files.read(right, piece)) for piece in pieces)


def _computed_buffers(built: PreTrainedModel) -> list[tuple[nn.Module, str, Tensor]]:
    """The buffers that no file holds, computed on the CPU, and where they belong."""
    places = [
        (module, name)
        for module in built.modules()
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    ]
    for module, name in places:
        planned = module._buffers[name]
        assert planned is not None
        module._buffers[name] = torch.empty_like(planned, device="cpu")
    for parameter in built.parameters():
        # As in transformers' own loading: only unmarked parameters are initialized.
        cast("Any", parameter)._is_hf_initialized = True
    built.initialize_weights()
    return [(module, name, cast("Tensor", module._buffers[name])) for module, name in places]


class _JoinedSources:
    """A `TensorSource` over several ones; of two tensors with the same name, it has the later one."""

    def __init__(self, *sources: TensorSource) -> None:
        self._owners = {name: source for source in sources for name in source.names()}

    def names(self) -> list[str]:
        return list(self._owners)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._owners[name].shape(name)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        return self._owners[name].read(name, slices)


def digest_of_directory(directory: Path, config: PretrainedConfig) -> str:
    """The digest of the weights in ``directory`` of a model with ``config``, as an engine with these weights has it."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    files = TensorFiles(directory, "model")
    name_as_in_files(model, files)
    layout = CheckpointLayout.of(model)
    names = (name for parameter, _ in model.named_parameters() for name in layout.names(parameter))
    return digest_of_parts(Comm(), ((name, files.read(name)) for name in names))
