"""Size of a model, without building it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig

from core_rl.config.engine import ModelConfig
from core_rl.toolkit.experts import expert_modules
from core_rl.toolkit.meta_build import model_on_meta


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Numbers of a model, adapter and head included."""

    parameters: int
    """Weights; tied ones count once."""
    trained: int
    """Weights that are not frozen."""
    outer: int
    """Weights outside of the layers: embeddings and head."""
    experts: int
    """Weights of all experts of a mixture, which expert parallel ranks share; 0 for other models."""
    largest: int
    """Numbers of the largest matrix outside of the layers that is trained, 0 where none is."""
    layers: int
    hidden: int
    inner: int
    """Numbers that a layer keeps of each token inside its attention and its MLP until the backward pass: queries, keys
    and values, the attention's result twice (as the attention and as the next product need it), and four inside a
    gated MLP. Of each expert that a token goes to, these four, and its inputs and outputs."""
    routed: int
    """The part of `inner` that experts keep of the tokens that were routed to them; 0 for other models."""
    normed: int
    """Numbers of each token that go through norms inside the attention: queries and keys, or none."""
    vocabulary: int


def footprint_of(model: ModelConfig) -> Footprint:
    """Build ``model`` on the meta device, which takes no memory, and count. Raises `ConfigError` as `build_model`."""
    built = model_on_meta(model)
    text = built.config.get_text_config()
    # Embeddings and head; tied ones count once.
    ends = (built.get_input_embeddings(), built.get_output_embeddings())
    outside = list({id(p): p for end in ends if end is not None for p in end.parameters()}.values())
    inside = any(name.endswith(".q_norm") for name, _ in built.named_modules())
    queries, keys = _widths(text)
    # Multi-head latent attention has values of a width of their own.
    value_width, shared = getattr(text, "v_head_dim", None), getattr(text, "qk_head_dim", None)
    ratio = value_width / shared if value_width and shared else 1.0
    # See `Footprint.routed`: tokens are sorted for each of their experts and back.
    expert_width = getattr(text, "moe_intermediate_size", None) or _mlp_width(text)
    routed = (getattr(text, "num_experts_per_tok", None) or 0) * (4 * expert_width + 2 * text.hidden_size)
    shared_width = getattr(text, "shared_expert_intermediate_size", None) or 0
    inside_mlp = routed + 4 * shared_width if routed else 4 * _mlp_width(text)
    return Footprint(
        parameters=_count(built.parameters()),
        trained=_count(p for p in built.parameters() if p.requires_grad),
        outer=_count(outside),
        experts=_count(p for module in expert_modules(built).values() for p in module.parameters()),
        largest=max((p.numel() for p in outside if p.requires_grad), default=0),
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        inner=int(queries + keys + ratio * (keys + 2 * queries) + inside_mlp),
        routed=routed,
        normed=queries + keys if inside else 0,
        vocabulary=int(text.vocab_size),
    )


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _widths(config: PretrainedConfig) -> tuple[int, int]:
    """Widths of all queries and of all keys; missing fields have their usual value."""
    heads = int(config.num_attention_heads)
    width = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    width = width or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return heads * width, groups * width


def _mlp_width(config: PretrainedConfig) -> int:
    return int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
