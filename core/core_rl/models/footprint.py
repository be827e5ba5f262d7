"""How large a model is, without building it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from core_rl.config.engine import ModelConfig
from core_rl.errors import ConfigError
from core_rl.models.build import finished, model_family, read_config

__all__ = ["Footprint", "footprint_of"]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Numbers of a model, adapter and head included."""

    parameters: int
    """Weights; tied ones count once."""
    trained: int
    """Those that are not frozen."""
    layers: int
    hidden: int
    inner: int
    """Numbers that a layer keeps of each token inside its attention and its MLP until the backward pass: queries, keys,
    values and the attention's result, and four inside a gated MLP, of the experts that a token goes to."""
    vocabulary: int


def footprint_of(model: ModelConfig) -> Footprint:
    """Build ``model`` on the meta device, which takes no memory, and count. Raises `ConfigError` as `build_model`."""
    config = read_config(model)
    try:
        with torch.device("meta"):
            built = model_family(model).from_config(config, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the model {model.path or model.config!r} cannot be built: {error}") from error
    built = finished(built, model, seed=0, experts="eager")
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in built.parameters()]
    text = config.get_text_config()
    return Footprint(
        parameters=sum(size for size, _ in sizes),
        trained=sum(size for size, trained in sizes if trained),
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        inner=_inner(text),
        vocabulary=int(text.vocab_size),
    )


def _inner(config: PretrainedConfig) -> int:
    """See `Footprint.inner`; configs that lack a name have its usual value."""
    heads = int(config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    experts = getattr(config, "moe_intermediate_size", None)
    if experts:
        mlp = experts * config.num_experts_per_tok
    return int(2 * (heads + groups) * width + 4 * mlp)
