"""Tensor parallelism by the plan that transformers gives its models.

Weights become `DTensor`s; modules compute with this rank's part of them as a plain tensor, so sizes
need not divide. There is one collective at each end of a pair of matrices (arXiv:1909.08053). With
sequence parallelism the tokens between the pairs are spread as well (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from core_rl.distributed.collectives import copy_to_region, gather, reduce_from_region, reduce_scatter
from core_rl.errors import LayoutError, UnsupportedCapability
from core_rl.toolkit.dtensor import own_part, shard_parameter
from core_rl.toolkit.parallel_context import ModelShards
from core_rl.toolkit.vision import has_tower

COLUMN, ROW = "colwise", "rowwise"
REPLICATED = ("replicated_with_grad_allreduce",)
"""Styles of transformers for weights that every rank has in full inside its part of an attention layer."""
SAME_LAYERS = {"qwen3_vl_text": "qwen3"}
"""Text models without a plan in transformers 5.23, and the model type with a plan for the same layers."""


def check_tensor_parallel(model: PreTrainedModel, degree: int) -> None:
    """Raise `UnsupportedCapability` for a model without a plan, and `LayoutError` for sizes that do not fit."""
    config = model.config.get_text_config()
    for modules in _split(model).values():
        for name in modules:
            module = _base(model.base_model.get_submodule(name))
            if not isinstance(module, nn.Linear):
                raise UnsupportedCapability(
                    f"tensor parallelism needs plain linear layers, and {name} of {type(model).__name__} is a "
                    f"{type(module).__name__}; set tp to 1 and use dp or cp"
                )
    heads = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    }
    wrong = [f"{name}={count}" for name, count in heads.items() if count % degree]
    if wrong:
        raise LayoutError(
            f"tp={degree} does not divide {' and '.join(wrong)} of {type(model).__name__}; "
            "choose a tp that divides them, or use cp"
        )
    rows = -(-config.vocab_size // degree)
    if rows * (degree - 1) >= config.vocab_size:
        raise LayoutError(f"tp={degree} leaves ranks without a row of vocab_size={config.vocab_size}")


def check_sequence_parallel(model: PreTrainedModel) -> None:
    """Raise `LayoutError` where the plan leaves attention layers whole: each rank would attend to its tokens alone.

    Raises it for a vision-language model as well.
    """
    if has_tower(model.config):
        raise LayoutError(
            f"sequence_parallel spreads hidden states, and features of images go to their places among all tokens in "
            f"the model type {model.config.model_type!r}; leave it off"
        )
    entered = {name.rpartition(".")[0] for name in _split(model)[COLUMN]}
    modules = model.base_model.named_modules()
    unsharded = [name for name, part in modules if "Attention" in type(part).__name__ and name not in entered]
    if unsharded:
        raise LayoutError(
            f"sequence_parallel spreads the tokens, and the tensor parallel plan of {type(model).__name__} leaves "
            f"{unsharded[0]} whole on every rank, which needs all of them; leave it off"
        )


def apply_tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh, shards: ModelShards) -> frozenset[str]:
    """Shard ``model`` in place over ``mesh``.

    Returns the names of the parameters that every rank has in full and of whose gradients it gets a
    part: they are to be added up over the ranks of ``mesh``.
    """
    split = _split(model)
    trunk = model.base_model
    for name in split[COLUMN]:
        # With an adapter, B cuts as the weight does, after an A that all ranks have.
        for part in _linear_parts(model, name, "lora_B"):
            module = trunk.get_submodule(part)
            shard_parameter(module, "weight", mesh, 0)
            shard_parameter(module, "bias", mesh, 0)
            _compute_by(module, partial(_columns, cast("nn.Linear", module)))
    for name in split[ROW]:
        # A cuts as the weight does, and B works on the sum over ranks, with the bias once.
        for part in _linear_parts(model, name, "lora_A"):
            module = trunk.get_submodule(part)
            shard_parameter(module, "weight", mesh, 1)
            _compute_by(module, partial(_rows, cast("nn.Linear", module), shards))
    for name in {name.rpartition(".")[0] for name in split[COLUMN]}:
        trunk.get_submodule(name).register_forward_pre_hook(partial(_enter, shards), with_kwargs=True)
    _shard_vocabulary(model, mesh, shards)
    return frozenset(_partial(model, split, shards))


def _base(module: nn.Module) -> nn.Module:
    """The layer itself, below the adapter if it has one."""
    base = getattr(module, "base_layer", module)
    assert isinstance(base, nn.Module)
    return base


def _linear_parts(model: PreTrainedModel, name: str, factor: str) -> list[str]:
    """Modules that a style applies to: the linear ``name``, or with an adapter its base layer and one ``factor``."""
    module = model.base_model.get_submodule(name)
    if _base(module) is module:
        return [name]
    factors = [f"{name}.{factor}.{adapter}" for adapter, _ in module.get_submodule(factor).named_children()]
    return [f"{name}.base_layer", *factors]


def _split(model: PreTrainedModel) -> dict[str, list[str]]:
    """The modules of ``model.base_model`` that transformers' plan cuts by columns and by rows."""
    # The plan of a vision-language model is of its text; each rank computes the whole tower.
    prefix = "language_model." if has_tower(model.config) else ""
    names = [name for name, _ in model.base_model.named_modules()]
    split: dict[str, list[str]] = {COLUMN: [], ROW: []}
    config = model.config.get_text_config()
    source = CONFIG_MAPPING[SAME_LAYERS[config.model_type]] if config.model_type in SAME_LAYERS else config
    for pattern, style in (getattr(source, "base_model_tp_plan", None) or {}).items():
        matches = [name for name in names if fnmatchcase(name, prefix + pattern)]
        if style in split:
            split[style] += matches
        elif matches and style not in REPLICATED:
            raise UnsupportedCapability(
                f"the tensor parallel plan of {type(model).__name__} asks for {style!r} at {pattern}, which is "
                "not supported; set tp to 1 and use dp or cp"
            )
    if not split[COLUMN] or not split[ROW]:
        raise UnsupportedCapability(
            f"{type(model).__name__} has no tensor parallel plan (base_model_tp_plan); set tp to 1 and use dp or cp"
        )
    return split


def _partial(model: PreTrainedModel, split: Mapping[str, list[str]], shards: ModelShards) -> Iterator[str]:
    inside = tuple(f"{model.base_model_prefix}.{name.rpartition('.')[0]}." for name in split[COLUMN])
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or name.startswith("score."):
            continue
        # Biases, and factors of adapters, that are applied to the sum.
        after_rows = any(name.startswith(f"{model.base_model_prefix}.{row}.") for row in split[ROW])
        # Inside, each rank has other heads or columns; outside, other tokens, if tokens are spread.
        if shards.sequence_parallel or (name.startswith(inside) and not after_rows):
            yield name


def _enter(
    shards: ModelShards, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hidden states on their way into the matrices of one module."""
    if args:
        return (_entered(args[0], shards), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": _entered(kwargs["hidden_states"], shards)}


def _entered(hidden: Tensor, shards: ModelShards) -> Tensor:
    """``[1, T, H]``, all tokens of this context parallel rank."""
    if shards.sequence_parallel:
        return gather(hidden, shards.tensor, 1, partial=True)
    return copy_to_region(hidden, shards.tensor)


def _shard_vocabulary(model: PreTrainedModel, mesh: DeviceMesh, shards: ModelShards) -> None:
    """Spread the rows of the embedding, and of the head if there is one; a tied head stays tied."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding)  # of every causal language model
    tied = isinstance(head, nn.Module) and head.weight is embedding.weight
    shard_parameter(embedding, "weight", mesh, 0)
    _compute_by(embedding, partial(_embed, embedding, shards))
    if isinstance(head, nn.Module):
        if tied:
            head.register_parameter("weight", cast("nn.Parameter", embedding.weight))
        else:
            shard_parameter(head, "weight", mesh, 0)
        shard_parameter(head, "bias", mesh, 0)


def _columns(module: nn.Linear, hidden: Tensor) -> Tensor:
    bias: object = module.bias
    return F.linear(hidden, own_part(module.weight), own_part(bias) if isinstance(bias, Tensor) else None)


def _rows(module: nn.Linear, shards: ModelShards, hidden: Tensor) -> Tensor:
    bias: object = module.bias
    output = _left(F.linear(hidden, own_part(module.weight)), shards)
    return output + bias if isinstance(bias, Tensor) else output


def _embed(module: nn.Embedding, shards: ModelShards, ids: Tensor) -> Tensor:
    weight = own_part(module.weight)
    vocabulary = shards.vocabulary(module.num_embeddings)
    assert vocabulary is not None  # the embedding is cut
    index, is_local = vocabulary.locate(ids, len(weight))
    padding = module.padding_idx
    if padding is not None:  # a row without a gradient
        padding -= vocabulary.start
        padding = padding if 0 <= padding < len(weight) else None
    embedded = F.embedding(index, weight, padding_idx=padding)
    # Selected, not multiplied: another rank's row must not count, whatever the first row holds.
    embedded = embedded.where(is_local[..., None], 0.0)
    scale = getattr(module, "embed_scale", None)  # Gemma 3 scales in the embedding
    output = _left(embedded, shards)
    return output if scale is None else output * scale.to(output.dtype)


def _left(value: Tensor, shards: ModelShards) -> Tensor:
    """The sum over ranks of ``[1, T, H]``: everywhere, or each rank's tokens of it."""
    if shards.sequence_parallel:
        return reduce_scatter(value, shards.tensor, 1)
    return reduce_from_region(value, shards.tensor)


def _compute_by(module: nn.Module, function: Callable[..., Tensor]) -> None:
    module.forward = function
