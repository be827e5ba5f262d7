"""Building a Hugging Face model with any of the three heads, from a directory or from a config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging

from core_rl.checkpoint.model_config import BUILD_ERRORS, cause_in, read_config
from core_rl.config.engine import ModelConfig
from core_rl.errors import ConfigError, UnsupportedCapability
from core_rl.toolkit.attention import PACKED_ATTENTION
from core_rl.toolkit.checkpoint_layout import CheckpointLayout
from core_rl.toolkit.experts import expert_modules
from core_rl.toolkit.lora import add_adapter
from core_rl.toolkit.model_files import model_files, require_causal, require_text, transpose_as_in_files
from core_rl.toolkit.positions import make_rotary_stateless
from core_rl.toolkit.vision import check_vision


def buildable_config(model: ModelConfig) -> PretrainedConfig:
    """The same of a model that can be built with or without its vision tower, as ``model`` asks.

    Raises `UnsupportedCapability`, and `ConfigError` as `read_config` does.
    """
    config = read_config(model)
    if model.vision:
        check_vision(config)
    elif model.head == "lm" and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        require_text(config, config.model_type)
    return config


def build_model(
    model: ModelConfig, *, seed: int, attn_implementation: str, experts: ExpertsKernel = "eager"
) -> PreTrainedModel:
    """A float32 model on the CPU, in evaluation mode, the same on every rank for the same ``seed``.

    With ``model.lora`` it has an adapter, and its base is frozen.

    Weights that no file gives (all of them for ``model.config``, the head for a new value model)
    are drawn from ``seed`` without touching the global random state. Raises `ConfigError` for
    missing or misshapen weights, and `UnsupportedCapability` for a model whose written form is no cut
    of its parameters.
    """
    config = buildable_config(model)
    if model.path is not None:
        model_files(model)
    family, attention = model_family(model), attention_of(config, attn_implementation)
    built: PreTrainedModel
    with torch.random.fork_rng(devices=[]), _quiet(), building(model):
        torch.manual_seed(seed)
        if model.path is None:
            built = family.from_config(config, attn_implementation=attention, dtype=torch.float32)
        else:
            built, report = family.from_pretrained(
                model.path,
                config=config,
                attn_implementation=attention,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
            )
            transpose_as_in_files(built, model_files(model))
            require_causal(built, model)  # its files may well lack the head
            missing = [name for name in sorted(report["missing_keys"]) if not is_new_head(model, name)]
            require_fitting(model, missing, sorted(map(str, report["mismatched_keys"])))
            if any(is_new_head(model, name) for name in report["missing_keys"]):
                built.get_submodule("score").load_state_dict({"weight": drawn_head(built, seed)})
    return finished(built, model, seed=seed, experts=experts)


@contextmanager
def building(model: ModelConfig) -> Iterator[None]:
    """Turn an error of transformers inside the context into a `ConfigError` about ``model``.

    A model with a table of attention classes, instead of transformers' interface, is an `UnsupportedCapability`.
    """
    try:
        yield
    except BUILD_ERRORS as error:
        if isinstance(error, KeyError) and error.args == (PACKED_ATTENTION,):
            raise UnsupportedCapability(
                f"the model type {read_config(model).model_type!r} has attention layers that ignore transformers' "
                "attention interface, so a packed batch cannot be computed right; choose another model, or the engine "
                "'reference'"
            ) from error
        raise ConfigError(
            f"the model {model.path or model.config!r} cannot be built: {cause_in(model, error)}"
        ) from error


def attention_of(config: PretrainedConfig, implementation: str) -> str | dict[str, str]:
    """The attention of each part of a model: a packed one is for text, and a vision tower keeps its images apart."""
    if implementation != PACKED_ATTENTION or "vision_config" not in config.sub_configs:
        return implementation
    return {"text_config": implementation, "vision_config": "sdpa"}


def model_family(model: ModelConfig) -> Any:
    """The class of transformers' that builds a model with this head."""
    if model.vision:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM if model.head == "lm" else AutoModelForSequenceClassification


def finished(
    built: PreTrainedModel, model: ModelConfig, *, seed: int, experts: ExpertsKernel
) -> PreTrainedModel:
    """A new model with the settings of ``model`` beyond its weights, in evaluation mode."""
    if not model.vision:
        require_text(built.config, type(built).__name__)
    require_causal(built, model)
    use_experts_kernel(built, experts)
    make_rotary_stateless(built)
    if model.frozen:
        freeze(built, model.frozen)
    if model.lora is not None:
        add_adapter(built, model.lora, model.head, seed)
    built.config.architectures = [type(built).__name__]  # the class that loads an export
    built.eval()
    return built


def freeze(model: PreTrainedModel, patterns: tuple[str, ...]) -> None:
    """Turn gradients off for the parameters that match the glob ``patterns``.

    A pattern matches in-memory names or checkpoint names. Raises `ConfigError` for a
    pattern that matches nothing, and for patterns that match a part of a fused parameter.
    """
    written = CheckpointLayout.of(model)
    parts = {memory_name: written.names(memory_name) for memory_name, _ in model.named_parameters()}
    names = [*parts, *(name for part in parts.values() for name in part)]
    idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    if idle:
        raise ConfigError(f"model.frozen = {idle} match no parameter; names look like {names[:3]}")
    for memory_name, parameter in model.named_parameters():
        frozen = [
            name for name in parts[memory_name] if _matches(name, patterns) or _matches(memory_name, patterns)
        ]
        if frozen and len(frozen) < len(parts[memory_name]):
            raise ConfigError(
                f"model.frozen matches {frozen[:3]}, a part of {memory_name!r}, which is one parameter in memory; "
                "freeze all of its experts or none"
            )
        parameter.requires_grad_(not frozen)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from writing bars and a report of every load, on every rank, to the caller's terminal.

    Problems in the report become our errors.
    """
    shown, verbosity = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if shown:
            hf_logging.enable_progress_bar()


def drawn_head(built: PreTrainedModel, seed: int) -> Tensor:
    """The weights of a new scalar head, as transformers initializes them, whatever else it draws for the model."""
    planned = cast("nn.Linear", built.get_submodule("score"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = nn.utils.skip_init(
            nn.Linear, planned.in_features, planned.out_features, bias=False, dtype=planned.weight.dtype
        )
        built._init_weights(head)
    return cast("Tensor", head.weight.detach())


def is_new_head(model: ModelConfig, name: str) -> bool:
    """Whether ``name`` is a scalar head, which files of a language model do not hold."""
    return model.head != "lm" and name == "score.weight"


def require_fitting(model: ModelConfig, missing: Sequence[str], misshapen: Sequence[str]) -> None:
    """Raise `ConfigError` if files lack tensors of the model, or hold them in another shape."""
    problems = {"missing": missing, "misshapen": misshapen}
    if parts := [f"{problem} {list(names[:5])}" for problem, names in problems.items() if names]:
        raise ConfigError(
            f"the weights in {model.path!r} do not fit their config: {', '.join(parts)}; take weights and config.json "
            "of one model, and of a language model, not a classifier"
        )


ExpertsKernel = Literal["eager", "grouped"]
"""``eager`` is transformers' loop over experts, ``grouped`` one grouped matrix product for all of them."""

ALIGNMENT = 8
"""Row lengths that grouped products take are multiples of 16 bytes: 8 numbers in half precision."""


def use_experts_kernel(model: PreTrainedModel, kernel: ExpertsKernel) -> None:
    """Compute the experts of ``model``, if it has any, by ``kernel``; sizes that no grouped product takes are eager.

    Both are differentiable in float32 and bfloat16, on the CPU and on CUDA. Both give an expert
    without tokens a gradient of zero, so that every rank has the same gradients to reduce.
    """
    experts = expert_modules(model).values()
    if not experts:
        return
    aligned = all(
        size % ALIGNMENT == 0
        for module in experts
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3
        for size in parameter.shape[1:]
    )
    model.set_experts_implementation("grouped_mm" if kernel == "grouped" and aligned else "eager")
