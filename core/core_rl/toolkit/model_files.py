"""Safetensors files of ``model.path``, compared with the module that is built from them."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)

from core_rl.backend.tensors import MappedSource, TensorSource
from core_rl.checkpoint.model_config import read_config
from core_rl.checkpoint.model_files import no_weights, some
from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.config.engine import ModelConfig
from core_rl.errors import CheckpointError, CheckpointNotFound, ConfigError, UnsupportedCapability
from core_rl.toolkit.checkpoint_layout import CheckpointLayout
from core_rl.toolkit.lora import checkpoint_name

COMPUTED = (r"rotary_emb\.\w+$", r"position_ids$", r"\.(attn|attention)\.(masked_)?bias$")
"""Buffers that older files have, and models compute."""


def model_files(model: ModelConfig) -> TensorFiles:
    """The files of ``model.path``; raises `ConfigError` for damaged ones, and where all weights are pickled."""
    directory = Path(model.path or "")
    try:
        return TensorFiles(directory, "model")
    except CheckpointNotFound as error:
        raise ConfigError(
            f"the model {model.path!r} cannot be built: {no_weights(directory)} ({error})"
        ) from error
    except CheckpointError as error:
        raise ConfigError(f"the model {model.path!r} cannot be built: {error}") from error


def require_text(config: PretrainedConfig, name: str) -> None:
    """Raise `UnsupportedCapability` for the ``config`` of a model ``name`` with more than text."""
    if "text_config" in type(config).sub_configs:
        raise UnsupportedCapability(
            f"{name} is more than a text model; set model.vision to true, which trains its vision tower as well "
            "(unless model.frozen names it), or set model.path to a checkpoint of its text model alone"
        )


def require_causal(built: PreTrainedModel, model: ModelConfig) -> None:
    """Raise `ConfigError` for an encoder with the head of a language model, and for a config that asks for one."""
    # A decoder has self-attention that is causal, and may have cross-attention that is not.
    causal = {module.is_causal for module in built.modules() if hasattr(module, "is_causal")}
    text = built.config.get_text_config(decoder=True)
    asked = text.is_encoder_decoder or getattr(text, "is_causal", True) is False
    encoder = causal == {False} and not getattr(built.config, "is_decoder", False)
    if model.head == "lm" and (asked or encoder):
        raise ConfigError(
            f"the model {model.path or model.config!r} of type {built.config.model_type!r} is an encoder: each token "
            "sees those after it, so that log-probs of the next token mean nothing; take a causal language model"
        )


def name_as_in_files(built: PreTrainedModel, files: TensorFiles) -> None:
    """Have `CheckpointLayout` name and transpose the parameters of ``built`` as ``files`` do.

    The files of a vision-language model have a prefix before the names of its text model. transformers records its
    removal when it loads the files itself, and writes it again.
    """
    conversions = get_model_conversion_mapping(built, None, None, False)
    _renamed(built, files.names(), conversions)
    if any(isinstance(conversion, PrefixChange) and conversion.was_used() for conversion in conversions):
        cast("Any", built)._weight_conversions = _used(conversions)
    transpose_as_in_files(built, files)


def transpose_as_in_files(built: PreTrainedModel, files: TensorFiles) -> None:
    """Have `CheckpointLayout` transpose the parameters of ``built`` that ``files`` hold transposed.

    transformers reads fused experts of Qwen3-VL-MoE both ways, as their shapes tell, and writes them as in memory.
    Published files have them transposed, and servers read no others. Raises `UnsupportedCapability` where a square
    matrix leaves open which way the files go.
    """
    conversions: list[WeightTransform] = getattr(
        built, "_weight_conversions", None
    ) or get_model_conversion_mapping(built, None, None, False)
    two_way = [conversion for conversion in conversions if _reads_both_ways(conversion)]
    transposed = [conversion for conversion in two_way if _is_transposed(built, files, conversion)]
    if not transposed:
        return
    if len(transposed) < len(two_way):
        raise UnsupportedCapability(
            f"{type(built).__name__} has square matrices of experts, which transformers reads as they are next to "
            "transposed ones; write its files by save_pretrained(), which transposes none"
        )
    for conversion in transposed:
        steps = cast("Any", conversion).operations
        cast("Any", conversion).operations = [Transpose(step.dim0, step.dim1) for step in steps]
    cast("Any", built)._weight_conversions = _used(conversions)


def _used(conversions: Iterable[WeightTransform]) -> list[WeightTransform]:
    """All but changes of prefixes that no name had."""
    return [
        conversion
        for conversion in conversions
        if not isinstance(conversion, PrefixChange) or conversion.was_used()
    ]


def _reads_both_ways(conversion: WeightTransform) -> bool:
    """Whether ``conversion`` transposes tensors, unless they have the shape that their parameters have."""
    steps = conversion.operations if isinstance(conversion, WeightConverter) else []
    return bool(steps) and all(
        isinstance(step, Transpose) and getattr(step, "check_dims", False) for step in steps
    )


def _is_transposed(built: PreTrainedModel, files: TensorFiles, conversion: WeightTransform) -> bool:
    """Whether ``files`` hold tensors of ``conversion`` in another shape than their parameters have."""
    names = [name for name in files.names() if conversion.rename_source_key(name)[1] is not None]
    shapes = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    renamed = _renamed(built, names, [conversion])
    return any(
        module_name in shapes and files.shape(name) != shapes[module_name]
        for name, module_name in zip(names, renamed, strict=True)
    )


def carried_tensors(
    built: PreTrainedModel, model: ModelConfig, written: Collection[str]
) -> TensorSource | None:
    """Tensors in the files of ``model`` that ``built``, whose checkpoint names are ``written``, does not hold.

    Such as a vision tower, or heads that transformers ignores. The output layer of a language model that a scalar
    head replaces is none of them. Raises `UnsupportedCapability` for quantized files, whose scales would not fit
    exported weights.
    """
    if model.path is None:
        return None
    files = model_files(model)
    unwritten = [name for name in files.names() if name not in written]
    if not unwritten:
        return None
    require_unquantized(model)
    replaced = _held_names(_planned(model)) if model.head != "lm" else ()
    carried = {name: name for name in unread_names(built, unwritten) if name not in replaced}
    return MappedSource(files, carried) if carried else None


def unread_names(built: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """The names, of ``names`` in files, that transformers takes for no tensor of ``built``, such as a tower's."""
    module_names = _held_names(built)
    renamed = _renamed(built, names, get_model_conversion_mapping(built))
    return [
        name
        for name, new in zip(names, renamed, strict=True)
        if new not in module_names and name not in module_names
    ]


def unused_tensors(built: PreTrainedModel, model: ModelConfig) -> list[str]:
    """Tensors in the files of ``model`` beside its layers that ``built`` does not compute, and transformers names.

    Raises `ConfigError` for tensors of its layers, such as a layer or a bias more than the config has.
    """
    carried = carried_tensors(built, model, ())
    names = set() if carried is None else {*carried.names()}
    config = built.config.get_text_config()
    depth, more = (
        getattr(config, name, None) or 0 for name in ("num_hidden_layers", "num_nextn_predict_layers")
    )
    predictors = [rf"layers\.{number}\." for number in range(depth, depth + more)]
    ignored = "|".join([*(built._keys_to_ignore_on_load_unexpected or ()), *COMPUTED, *predictors])
    unused = sorted(name for name in names if not re.search(ignored, name))
    lists = {_list_of(name) for name in model_files(model).names() if name not in names}
    if inside := [name for name in unused if _list_of(name) in lists]:
        raise ConfigError(
            f"the weights in {model.path!r} do not fit their config: the model has no {some(inside)} in its layers; "
            "take the config.json of these weights"
        )
    return unused


def _list_of(name: str) -> str:
    """The list that a tensor is in: ``model.layers`` of ``model.layers.3.mlp.up_proj.weight``."""
    return re.split(r"\.\d+\.", name)[0]


def exported_config(
    built: PreTrainedModel, model: ModelConfig, carried: TensorSource | None
) -> PretrainedConfig:
    """The config of ``built`` together with its ``carried`` tensors: that of the whole model in ``model.path``."""
    trained: PretrainedConfig = built.config
    if carried is None or model.head != "lm":
        return trained
    source = read_config(model)
    if "text_config" in type(source).sub_configs:
        return source
    config = copy.deepcopy(trained)
    config.architectures = source.architectures or trained.architectures
    return config


def exported_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in an ``hf`` export of the language model in ``model.path``."""
    built = _planned(model)
    name_as_in_files(built, model_files(model))
    parameters = {name: tuple(value.shape) for name, value in built.named_parameters()}
    saved = built.state_dict().keys()
    shapes = CheckpointLayout.of(built).shapes(parameters)
    shapes |= {name: tuple(value.shape) for name, value in built.named_buffers() if name in saved}
    carried = carried_tensors(built, model, shapes)
    return shapes | ({} if carried is None else {name: carried.shape(name) for name in carried.names()})


def _planned(model: ModelConfig) -> PreTrainedModel:
    """The language model in ``model.path``, without memory."""
    family: Any = AutoModelForImageTextToText if model.vision else AutoModelForCausalLM
    with torch.device("meta"):
        built: PreTrainedModel = family.from_config(read_config(model))
    return built


def _held_names(built: PreTrainedModel) -> set[str]:
    """In-memory names of parameters and persistent buffers, tied tensors under each name, without adapters."""
    return {checkpoint_name(name) for name in built.state_dict()}


def _renamed(built: PreTrainedModel, names: Iterable[str], conversions: list[WeightTransform]) -> list[str]:
    """In-memory names that transformers gives to tensors of a checkpoint, in its way of loading."""
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    module_names = dict.fromkeys(_held_names(built), True)
    prefix = built.base_model_prefix
    return [rename_source_key(name, renamings, converters, prefix, module_names)[0] for name in names]


def require_unquantized(model: ModelConfig) -> None:
    """Raise `UnsupportedCapability` for weights with scales, which are no parameters."""
    if getattr(read_config(model), "quantization_config", None) is not None:
        raise UnsupportedCapability(
            f"the weights in {model.path!r} are quantized, and trained weights do not fit their scales; set "
            "model.path to weights in bfloat16 or float32"
        )
