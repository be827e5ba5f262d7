"""Checks and defaults of options for a model, whose violations are raised together."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterator

from transformers import PretrainedConfig

from core_rl.distributed.devices import device_type
from core_rl.errors import ConfigError, raise_all
from core_rl.toolkit.build import ALIGNMENT
from core_rl_megatron.config import MegatronConfig


def check_options(config: MegatronConfig, model: PretrainedConfig) -> None:
    """Raise one `ConfigError` with every option that ``model``, the other fields or this machine do not allow."""
    problems = [
        *_overlap_problems(config),
        *_expert_problems(config, model),
        *_fusion_problems(config),
        *_transformer_engine_problems(config),
    ]
    raise_all(ConfigError, "options of the engine 'megatron'", problems)


def check_settings(config: MegatronConfig, model: PretrainedConfig) -> None:
    """The part of `check_options` that is the same on every machine."""
    problems = [*_overlap_problems(config), *_expert_problems(config, model)]
    raise_all(ConfigError, "options of the engine 'megatron'", problems)


def groups_experts(config: MegatronConfig, model: PretrainedConfig) -> bool:
    """Whether experts are computed by grouped products."""
    option = config.options.moe_grouped_gemm
    return bool(getattr(model, "num_experts", None) and not _odd_sizes(model)) if option is None else option


def uses_fusions(config: MegatronConfig) -> bool:
    """Whether pointwise operations are fused."""
    option = config.options.fusions
    return device_type(config.device) == "cuda" and not _missing_for_compiling() if option is None else option


def _overlap_problems(config: MegatronConfig) -> Iterator[str]:
    options = config.options
    if options.overlap_param_gather and not options.distributed_optimizer:
        yield (
            "overlap_param_gather = true gathers what the distributed optimizer has spread; set it to false, or "
            "distributed_optimizer to true"
        )
    if options.ddp_bucket_size is not None and not options.overlap_grad_reduce:
        yield (
            f"ddp_bucket_size = {options.ddp_bucket_size} without overlap_grad_reduce, where all gradients are one "
            "bucket; leave it out, or set overlap_grad_reduce to true"
        )


def _expert_problems(config: MegatronConfig, model: PretrainedConfig) -> Iterator[str]:
    if not config.options.moe_grouped_gemm:
        return
    if not getattr(model, "num_experts", None):
        yield f"moe_grouped_gemm = true, and this {model.model_type!r} model has no experts; leave it out"
    elif odd := _odd_sizes(model):
        sizes = ", ".join(f"{name}={getattr(model, name)}" for name in odd)
        yield (
            f"moe_grouped_gemm = true needs sizes that {ALIGNMENT} divides, and this model has {sizes}; leave it out"
        )


def _odd_sizes(model: PretrainedConfig) -> list[str]:
    """Sizes of rows that no grouped product takes."""
    return [name for name in ("hidden_size", "moe_intermediate_size") if getattr(model, name) % ALIGNMENT]


def _fusion_problems(config: MegatronConfig) -> Iterator[str]:
    if config.options.fusions and device_type(config.device) == "cuda":
        for name in _missing_for_compiling():
            yield f"fusions = true compiles on CUDA, for which there is no {name}; install it, or leave fusions out"


def _missing_for_compiling() -> list[str]:
    """Requirements of `torch.compile` for CUDA that this machine lacks."""
    missing = [] if importlib.util.find_spec("triton") else ["triton (pip install triton)"]
    compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
    return missing if any(map(shutil.which, filter(None, compilers))) else [*missing, "C compiler (gcc)"]


def _transformer_engine_problems(config: MegatronConfig) -> Iterator[str]:
    if config.options.transformer_impl != "transformer_engine":
        return
    setting = "transformer_impl = 'transformer_engine'"
    if device_type(config.device) != "cuda":
        yield f"{setting} runs on CUDA alone, and device is the CPU; set transformer_impl to 'local'"
    if config.model.lora is not None:
        yield f"{setting} has no adapters (model.lora) in this engine; set transformer_impl to 'local'"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:  # OSError: its libraries do not fit this machine's
        yield (
            f"{setting} needs the package transformer-engine, which cannot be imported ({error}); "
            "run: pip install 'transformer-engine[pytorch]', or set transformer_impl to 'local'"
        )
