"""Low-rank adapters (LoRA) in a Hugging Face model: adding one, its names, merging, switching it off.

``peft``, an optional dependency, has the adapter layers; it is imported where it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from core_rl.backend.protocols import LowRank
from core_rl.config.engine import Head, LoraConfig
from core_rl.config.hub import hub_source
from core_rl.errors import ConfigError
from core_rl.registry.packages import import_extra

__all__ = [
    "ADAPTER_PREFIX",
    "adapter_config",
    "adapter_shapes",
    "add_adapter",
    "checkpoint_name",
    "enable_adapter",
    "exported_name",
    "fresh_adapter",
    "has_kind",
    "low_rank_products",
]

ADAPTER_PREFIX = "base_model.model."
"""Prefix of an adapter's tensors in ``peft``."""
NAME = "default"
"""The name under which ``peft`` keeps the only adapter; it is not in exported names."""
SEED_OFFSET = 1 << 40
"""The adapter is not drawn from the stream of random numbers that a drawn base model comes from."""


def add_adapter(model: PreTrainedModel, config: LoraConfig, head: Head, seed: int) -> None:
    """Put adapter layers into ``model``, in place; only they and a scalar head are trained from then on.

    ``A`` is drawn from ``seed`` without touching the global random state, the same on every rank, and
    ``B`` is 0: the outputs stay the same. On the meta device neither has values; see
    `fresh_adapter`. Class and modules of the model stay as well, so that what runs it need not know.

    Raises `ConfigError` without ``peft``, and for target modules that match nothing.
    """
    peft = _import_peft()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    targets = _targets(model, config)
    settings = _peft_config(model, config, head, _short(model, targets))
    with torch.random.fork_rng(devices=[]):
        try:
            peft.inject_adapter_in_model(settings, model, NAME, low_cpu_mem_usage=True)
        except ValueError as error:  # layers whose weight a kernel reads by itself (Mamba)
            raise ConfigError(f"model.lora.target_modules: peft refuses them: {error}") from error
    device = next(model.base_model.parameters()).device
    fresh = fresh_adapter(model, seed)
    for name, parameter in [*model.named_parameters()]:
        if name.startswith("score."):
            parameter.requires_grad_(name in trained)
        if (value := fresh.get(checkpoint_name(name))) is not None:
            module, _, last = name.rpartition(".")
            drawn = nn.Parameter(value.to(device), requires_grad=True)
            model.get_submodule(module).register_parameter(last, drawn)


def fresh_adapter(model: PreTrainedModel, seed: int) -> dict[str, Tensor]:
    """The values with which the adapter of ``model`` begins, float32, by their written names.

    ``A`` is drawn as ``peft`` draws it and ``B`` is 0; a model without memory has the same.
    """
    generator = torch.Generator().manual_seed(seed + SEED_OFFSET)
    shapes = {checkpoint_name(name): parameter.shape for name, parameter in model.named_parameters()}
    fresh = {}
    for product in low_rank_products(model).values():
        fresh[product.a] = torch.empty(shapes[product.a])
        nn.init.kaiming_uniform_(fresh[product.a], a=math.sqrt(5), generator=generator)
        fresh[product.b] = torch.zeros(shapes[product.b])
    return fresh


def adapter_config(
    model: PreTrainedModel, config: LoraConfig, head: Head, base: str | None
) -> dict[str, Any]:
    """The ``adapter_config.json`` with which ``peft`` and servers read the adapter of ``model``.

    It names the model in ``base`` by its Hub id, and no directory of this machine.
    """
    products = low_rank_products(model).values()
    layers = [product.a.removeprefix(ADAPTER_PREFIX).removesuffix(".lora_A.weight") for product in products]
    peft_config = _peft_config(model, config, head, _short(model, layers))
    peft_config.base_model_name_or_path, peft_config.revision = hub_source(base)
    peft_config.inference_mode = True
    peft_config.modules_to_save = None if head == "lm" else ["score"]
    values: dict[str, Any] = peft_config.to_dict()
    return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}


def checkpoint_name(name: str) -> str:
    """The name under which the parameter ``name`` of a model with an adapter is written.

    A base parameter has the name that it has without the adapter, and a part of the adapter its
    name in ``peft``.
    """
    if ".lora_A." in name or ".lora_B." in name:
        return ADAPTER_PREFIX + name.replace(f".{NAME}.", ".")
    return name.replace(".base_layer.", ".")


def has_kind(name: str, kind: str, *, trained: bool) -> bool:
    """Whether the tensor with the checkpoint name ``name`` belongs to ``kind``: values, or gradients and moments.

    An adapter has its factors, and the scalar head if there is one.
    """
    factor = name.startswith(ADAPTER_PREFIX)
    values = {"params": not factor, "master": True, "adapter": factor or name.startswith("score.")}
    return values.get(kind, trained)


def exported_name(kind: str, name: str) -> str:
    """The name of the tensor ``name`` in ``kind``: in an adapter, ``peft`` gives its prefix to a head as well."""
    prefixed = kind == "adapter" and not name.startswith(ADAPTER_PREFIX)
    return ADAPTER_PREFIX + name if prefixed else name


def adapter_shapes(config: PretrainedConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Written names and shapes of the factors that ``lora`` adds to a language model with ``config``.

    Raises `ConfigError` as `add_adapter` does.
    """
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    add_adapter(model, lora, "lm", 0)
    shapes = {checkpoint_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {name: shape for name, shape in shapes.items() if name.startswith(ADAPTER_PREFIX)}


def low_rank_products(model: nn.Module) -> dict[str, LowRank]:
    """Low-rank products of the adapter of ``model``, by the weight's `checkpoint_name`; empty without an adapter."""
    return {
        f"{name}.weight": LowRank(
            a=f"{ADAPTER_PREFIX}{name}.lora_A.weight",
            b=f"{ADAPTER_PREFIX}{name}.lora_B.weight",
            scaling=float(layer.scaling[NAME]),
            transposed=isinstance(layer.base_layer, Conv1D),
        )
        for name, layer in _adapted_layers(model)
    }


def enable_adapter(model: nn.Module, enabled: bool) -> None:
    """Turn adapter layers on, or off: then each computes what its base layer computes."""
    for _, layer in _adapted_layers(model):
        # peft's enable_adapters() would also turn requires_grad off and on again, and of a sharded
        # module it may find the gathered parameters at one time and the shards at the other.
        layer._disable_adapters = not enabled


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    modules = model.named_modules()
    return (entry for entry in modules if hasattr(entry[1], "lora_A") and hasattr(entry[1], "base_layer"))


def _import_peft() -> Any:
    return import_extra("peft", "model.lora needs the package peft")


def _peft_config(model: PreTrainedModel, config: LoraConfig, head: Head, targets: Iterable[str]) -> Any:
    return _import_peft().LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        use_rslora=config.rslora,
        target_modules=sorted(targets),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM" if head == "lm" else "SEQ_CLS",
    )


def _targets(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Full names of the layers that get an adapter."""
    # Not the head, whose weight may be the embedding's as well (peft #2018), and no layer with a name of experts or
    # routers of its family: ``peft`` takes it for their parameters, also in dense layers.
    trunk = {id(module) for module in model.base_model.modules()}
    head = model.get_output_embeddings()  # a few models are their own trunk
    names = [
        name
        for name, module in model.named_modules()
        if id(module) in trunk and module is not head and isinstance(module, nn.Linear | Conv1D)
    ]
    layers = {name.rpartition(".")[2] for name in names}
    layers = {name for name in layers if not _names_parameters(model, name)}
    linear = [name for name in names if name.rpartition(".")[2] in layers]
    if config.target_modules == "all-linear":
        part = getattr(model.base_model, "language_model", None) or model.base_model  # next to a vision tower
        text = {id(module) for module in part.modules()}
        return [name for name in linear if id(model.get_submodule(name)) in text]
    idle = [target for target in config.target_modules if not any(_matches(name, target) for name in linear)]
    if idle or not config.target_modules:
        last = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"model.lora.target_modules: {idle or 'an empty list'} matches no linear layer of the trunk, where "
            f"there are {', '.join(last)}; embeddings, heads (a tie would carry it over) and experts take no adapter"
        )
    return [name for name in linear if any(_matches(name, target) for target in config.target_modules)]


def _names_parameters(model: PreTrainedModel, name: str) -> bool:
    """Whether ``peft`` takes ``name``, of layers in transformers 4, for fused parameters of ``model``."""
    config = _import_peft().LoraConfig(target_modules=[name])
    conversion = import_extra(
        "peft.utils.transformers_weight_conversion", "model.lora needs peft 0.19 or later"
    )
    try:
        conversion.convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # a half of fused weights
        return True
    return bool(config.target_parameters)


def _matches(name: str, target: str) -> bool:
    """As ``peft`` matches names."""
    return name == target or name.endswith(f".{target}")


def _short(model: PreTrainedModel, layers: Iterable[str]) -> list[str]:
    """``layers`` by the last parts of their names, as servers expect them, where these name no other module."""
    targets = set(layers)
    last = {name.rpartition(".")[2] for name in targets}
    matches = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last}
    return sorted(last if matches == targets else targets)
