"""Tiny models that expose bugs, built from a config into a directory; nothing is downloaded.

Their logits are peaked (near-uniform ones hide errors), and their vocabularies are prime. Norm weights differ from 1,
and biases from 0. Key/value heads are fewer than query heads where the family can. Where the family can, their hidden
sizes are odd: no number of ranks, and no alignment of a flat buffer, divides every parameter. Their generation
configs are full of defaults, which no request asks for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    Gemma2Config,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from core_rl.config.engine import Head
from core_rl_conformance.inputs.tiny_experts import draw_router, mark_tokens
from core_rl_conformance.inputs.tiny_vision import (
    DELTA_NET,
    MIXTURE,
    PLAIN,
    SHARED,
    VOCABULARY,
    spread_positions,
    vision_config,
)
from core_rl_conformance.profile import VISION, VISION_MOE
from core_rl_oracle.experts import all_written, overwrite, parameters_of, written
from core_rl_oracle.media import model_class

MAX_LENGTH: int = SHARED["max_position_embeddings"]
"""Tokens that a tiny model takes."""
FILE_SIZE = "20KB"
"""A tiny model has many such files."""
DEEP = 3
"""Layers of models for steps and checkpoints: a fault of layers from the third on shows."""
LONG_LENGTH = 640
"""Tokens that a long tiny model takes."""
LONG_WINDOW = 150
"""Tokens of sliding attention in a long model, more than others take at all."""
UNUSUAL: dict[str, dict[str, Any]] = {
    "rope_theta": {"rope_parameters": {"rope_theta": 500.0}},
    "rope scaling": {},
    "the epsilon of norms": {"rms_norm_eps": 0.03, "layer_norm_epsilon": 0.03},
}
"""Constants away from any default, by name; a family has some of them, and its own scaling of `SCALINGS`."""
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": LONG_LENGTH // 4,
    # Not the values that follow from the rest.
    "attention_factor": 1.25,
    "beta_fast": 16.0,
    "beta_slow": 6.0,
}
SCALINGS = {"llama": LLAMA3, "qwen2": YARN, "qwen3": YARN, "qwen3_moe": YARN}
"""The rotary scaling of published models, by model type; Gemma 2 and GPT-2 have none."""
EXPERT_DIMS = 3
"""Dimensions of fused weights of experts."""
DropoutPlace = Literal["embedding", "residual", "attention"]
FOCUS = 60.0
"""Attention scores of a focused model, for each pair of rotary dimensions."""
LOGIT_STD = 3.0
"""Standard deviation of the logits: with some 200 tokens, the entropy is a quarter of the uniform one."""


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """One tiny model; equal fields give bitwise equal weights."""

    family: str
    seed: int = 0
    source: str = ""
    """The directory with its config, and with the weights of seed 0; empty for a model of the suite."""
    head: Head = "lm"
    dropout: float = 0.0
    dropout_at: DropoutPlace | None = None
    """The only place of dropout; None is every place of the family."""
    eos: int | tuple[int, ...] | None = None
    """The end-of-sequence token, or several; None is the family's own."""
    pad_is_eos: bool = False
    """Padding has the id of the end-of-sequence token, as in many published configs."""
    vocabulary: int | None = None
    """The number of token ids; None is the family's own."""
    heads: int | None = None
    """The number of attention heads; None is the family's own."""
    kv_heads: int | None = None
    """The number of key/value heads, of a family that has some; None is the family's own."""
    head_size: int | None = None
    """The numbers in an attention head, of a family that can choose them; None is the family's own."""
    layers: int | None = None
    """The number of layers; None is the family's own."""
    inner: int | None = None
    """The numbers inside an MLP; None is the family's own."""
    experts: int | None = None
    """The number of experts, of a mixture; None is the family's own."""
    plain_gates: bool = False
    """Gates of a mixture are the probabilities of the chosen experts; otherwise these are divided by their sum."""
    longest: int | None = None
    """The tokens that it takes; None is the family's own number."""
    long: bool = False
    """Whether it takes `LONG_LENGTH` tokens and has three layers or more, and unusual constants."""
    exact: bool = False
    """No step of a pass rounds in bfloat16, as long as norms, softmax and heads are in float32."""
    focused: bool = False
    """Layers of an ``exact`` model: tokens attend to themselves alone, by rotary positions, and the first layer adds
    that."""
    uniform: bool = False
    """All tokens have the same probability: the head, which embeddings do not share, has zeros."""
    usual: str = ""
    """The part of `UNUSUAL` that a ``long`` model does without: an engine that ignores it computes such a model."""

    @cached_property
    def vocab_size(self) -> int:
        """The number of token ids, of text alone for a vision-language model."""
        return VOCABULARY if self.vision else int(self.config().vocab_size)

    @property
    def vision(self) -> bool:
        return self.family in VISION

    def config(self) -> PretrainedConfig:
        config = self._own_config()
        fields = {
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.longest,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "n_inner" if self.family == "gpt2" else "intermediate_size": self.inner,
            "head_dim": self.head_size,
            "num_experts": self.experts,
            "norm_topk_prob": False if self.plain_gates else None,
        }
        text = config.get_text_config()
        for name, value in fields.items():
            if value is not None:
                setattr(text, name, value)
        spread_positions(text, self.head_size)
        if self.head != "lm":
            config.num_labels = 1
        if self.long:
            _make_long(text, UNUSUAL.keys() if self.focused else {self.usual})
        if self.exact or self.uniform:
            config.tie_word_embeddings = False
        if self.layers is not None:
            _set_layers(text, self.layers)
        if self.eos is not None:
            for part in (config, text):
                part.eos_token_id = self.eos if isinstance(self.eos, int) else list(self.eos)
        if self.pad_is_eos:
            config.pad_token_id = config.eos_token_id
        return config

    def _own_config(self) -> PretrainedConfig:
        if self.source:
            config: PretrainedConfig = AutoConfig.from_pretrained(self.source, local_files_only=True)
            return config
        if self.vision:
            return vision_config(self.family)
        if self.family in OTHER_LAYERS:
            values = OTHER_LAYERS[self.family] | {"attention_dropout": self.dropout}
            return AutoConfig.for_model(self.family, **values)
        kind, fields = CONFIGS[self.family]
        rates: dict[str, Any] = {
            name: self.dropout if self.dropout_at in (None, place) else 0.0
            for place, name in dropout_fields(self.family).items()
        }
        return kind(**fields, **rates)

    def with_multiples(self, layers: int, experts: int) -> TinyModel:
        """The same with as many layers, and experts if it has some, as it takes for these numbers to divide them."""
        config = self.config().get_text_config()
        own_layers, own_experts = config.num_hidden_layers, getattr(config, "num_experts", None) or 0
        more_layers, more_experts = -own_layers % layers, -own_experts % experts
        return replace(
            self,
            layers=own_layers + more_layers if more_layers else self.layers,
            experts=own_experts + more_experts if more_experts else self.experts,
        )

    def with_odd_heads(self) -> TinyModel:
        """The same with a number of heads that 2 does not divide, and one key/value head where the family can."""
        config = self.config()
        heads = next(n for n in range(3, config.hidden_size + 1, 2) if config.hidden_size % n == 0)
        grouped = getattr(config, "num_key_value_heads", None) is not None
        return replace(self, heads=heads, kv_heads=1 if grouped else None)


def _make_long(config: PretrainedConfig, usual: Collection[str]) -> None:
    """Change length, depth and constants of ``config``, but for the parts ``usual`` of `UNUSUAL`."""
    config.max_position_embeddings = LONG_LENGTH
    _set_layers(config, DEEP)
    if getattr(config, "sliding_window", None):
        config.sliding_window = LONG_WINDOW
    scaling = {"rope scaling": {"rope_parameters": SCALINGS.get(config.model_type, {})}}
    for part, values in (UNUSUAL | scaling).items():
        for name, value in values.items():
            if part in usual or not hasattr(config, name):
                continue
            limit = getattr(config, name)
            setattr(config, name, _laid_over(limit, value) if isinstance(value, dict) else value)


def _laid_over(parameters: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary ``parameters``, flat or for each kind of layer, with ``values``; each kind gets a base of its own."""
    if not any(isinstance(part, dict) for part in parameters.values()):
        return {**parameters, **values}
    return {
        kind: {**part, **values, **({"rope_theta": values["rope_theta"] * number} if values else {})}
        for number, (kind, part) in enumerate(parameters.items(), start=1)
    }


def _set_layers(config: PretrainedConfig, count: int) -> None:
    config.num_hidden_layers = count
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = [kinds[layer % len(kinds)] for layer in range(count)]


GPT2_DROPOUT: dict[DropoutPlace, str] = {
    "embedding": "embd_pdrop",
    "residual": "resid_pdrop",
    "attention": "attn_pdrop",
}
CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    # Norms on queries and keys, a head size of its own, tied embeddings.
    "qwen3": (
        Qwen3Config,
        {
            **SHARED,
            "vocab_size": 211,
            "hidden_size": 45,
            "intermediate_size": 70,
            "head_dim": 10,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
        },
    ),
    "llama": (LlamaConfig, {**PLAIN, "vocab_size": 151}),
    # Biases on queries, keys and values.
    "qwen2": (Qwen2Config, {**PLAIN, "vocab_size": 173}),
    # Absolute positions, layer norms, biases everywhere, tied embeddings; one id is both BOS and EOS.
    "gpt2": (
        GPT2Config,
        {
            "vocab_size": 163,
            "n_embd": 36,
            "n_inner": 57,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": MAX_LENGTH,
            "bos_token_id": 162,
            "eos_token_id": 162,
            "tie_word_embeddings": True,
            "pad_token_id": None,
        },
    ),
    # Scaled tied embeddings, norms that multiply by 1 + weight, a gated GELU, soft caps low enough to bend most
    # scores, a sliding window of 5 tokens, and biases in the attention, also after its output. The head size is not
    # hidden size over heads, and the scale of attention is neither's.
    "gemma2": (
        Gemma2Config,
        {
            **SHARED,
            "vocab_size": 157,
            "hidden_size": 44,
            "intermediate_size": 58,
            "head_dim": 6,
            "query_pre_attn_scalar": 9,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 8.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {**PLAIN, **MIXTURE, "vocab_size": 157, "norm_topk_prob": True, "bos_token_id": 0},
    ),
    # The same after Gated DeltaNet or gated attention, with a shared expert, and projections key head by key head.
    "qwen3_next": (
        Qwen3NextConfig,
        {
            **PLAIN,
            **DELTA_NET,
            **MIXTURE,
            "head_dim": 10,
            "vocab_size": 167,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_expert_intermediate_size": 18,
            "norm_topk_prob": True,
        },
    ),
}


def dropout_fields(family: str) -> dict[DropoutPlace, str]:
    """The fields with rates of dropout, by place."""
    return GPT2_DROPOUT if family == "gpt2" else {"attention": "attention_dropout"}


OTHER_LAYERS: dict[str, dict[str, Any]] = {
    # Gated DeltaNet and convolutions, and gated full attention with a part of each head rotated.
    "qwen3_5_text": {
        **PLAIN,
        **DELTA_NET,
        "head_dim": 10,
        "vocab_size": 149,
        "layer_types": ["linear_attention", "full_attention"],
    },
    # Latent attention: queries and keys are wider than values. All layers are dense: its routers are for other checks.
    "deepseek_v3": {
        **PLAIN,
        "vocab_size": 139,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 64,
        "n_routed_experts": 0,
        "q_lora_rank": 14,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
    },
    # Attention sinks, as in gpt-oss, a sliding window of 5 tokens, and factors of scores, residuals and logits.
    "granite_swa": {
        **PLAIN,
        "vocab_size": 131,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    # A buffer that files hold in each layer, and that scales its output.
    "gemma4_text": {
        **PLAIN,
        "vocab_size": 137,
        "head_dim": 10,
        "global_head_dim": 10,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
}
"""Families with layers of other kinds, by model type: engines compute them right or refuse them. Not every version of
transformers that is supported has them all."""


class ModelStore:
    """Builds each tiny model once into a directory below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._built: dict[TinyModel, Path] = {}

    def directory(self, model: TinyModel) -> Path:
        """The directory of ``model``: config and safetensors, as ``save_pretrained`` writes them."""
        if model not in self._built:
            changed = [
                f"{part.name}{getattr(model, part.name)}"
                for part in fields(model)
                if part.name not in ("family", "source") and getattr(model, part.name) != part.default
            ]
            path = self.root / "-".join([model.family, *changed]).replace(" ", "")
            if model == TinyModel(family=model.family, source=model.source) and model.source:
                path = Path(model.source)
            else:
                self._write(model, path)
            self._built[model] = path
        return self._built[model]

    def _write(self, model: TinyModel, path: Path) -> None:
        _save(build(model), path)
        if model.head == "lm":
            # As published models have; a request sets every option, so no default may be applied.
            config = model.config()
            defaults = {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.3}
            ids = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")}
            GenerationConfig(**ids, do_sample=True, **defaults).save_pretrained(path)


def _save(built: PreTrainedModel, path: Path, prefix: str = "", file_size: str = "50GB") -> None:
    """Write ``built`` as published files are, with names that lack ``prefix``."""
    state = {name.removeprefix(prefix): value for name, value in built.state_dict().items()}
    published = built.config.model_type == VISION_MOE
    if published:  # transformers would write experts as in memory
        state = {
            name: part for module_name, value in state.items() for name, part in written(module_name, value)
        }
    state = {name: value.contiguous() for name, value in state.items()}
    built.save_pretrained(
        path, state_dict=state, max_shard_size=file_size, save_original_format=not published
    )


def save_with(model: TinyModel, weights: Mapping[str, Tensor], path: Path) -> None:
    """Write ``model`` with other weights, by name, to the directory ``path``."""
    built = build(model)
    overwrite({name: parameter.detach() for name, parameter in parameters_of(built).items()}, weights)
    _save(built, path)


def save_as(
    model: TinyModel, dtype: torch.dtype, file_size: str, path: Path, *, prefixed: bool = True
) -> dict[str, Tensor]:
    """Write ``model`` in ``dtype`` to files of up to ``file_size`` each, such as ``20KB``; the values of its weights.

    They are float32, by the names that `save_pretrained` gives. Without ``prefixed``, names in the files lack the
    prefix of the trunk, as in published files of base models (GPT-2).
    """
    built = build(model)
    torch.nn.Module.to(built, dtype)
    prefix = "" if prefixed else f"{built.base_model_prefix}."
    _save(built, path, prefix, file_size)
    values = all_written(parameters_of(built))
    return {name: value.detach().float() for name, value in values.items()}


def build(model: TinyModel) -> PreTrainedModel:
    """The model in memory, float32."""
    family = model_class(model.head, model.vision)
    if model.source and model.seed == 0:
        built: PreTrainedModel = family.from_pretrained(
            model.source, config=model.config(), dtype=torch.float32, local_files_only=True
        )
    else:
        built = _drawn(model, family)
    if model.uniform:
        torch.nn.init.zeros_(built.lm_head.weight)
    return built


def _drawn(model: TinyModel, family: Any) -> PreTrainedModel:
    built: PreTrainedModel = family.from_config(model.config(), dtype=torch.float32)
    # One generator for each parameter: the trunk of all heads is the same.
    with torch.no_grad():
        buffers = ((name, value) for name, value in built.named_buffers() if name in built.state_dict())
        for name, parameter in (*built.named_parameters(), *buffers):
            generator = torch.Generator().manual_seed(_stable_hash(f"{model.family}/{model.seed}/{name}"))
            draw = _draw_focused if model.focused else _draw_exact if model.exact else _draw
            parameter.copy_(draw(name, parameter, generator, built))
        mark_tokens(built)
    return built


def _draw(name: str, parameter: Tensor, generator: torch.Generator, model: PreTrainedModel) -> Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    if name.endswith("mlp.gate.weight"):
        return draw_router(name, noise)
    if parameter.dim() == 1:
        if name.endswith("bias"):
            return 0.1 * noise
        in_tower = name.startswith("model.vis")
        final = not in_tower and name.rsplit(".", 2)[-2] in ("norm", "ln_f")
        peak = LOGIT_STD if final and model.config.tie_word_embeddings else 1.0
        # Norms of Gemma add the 1 themselves, and so do Qwen3.5 and Qwen3-Next outside their linear attention.
        adds = (
            model.config.model_type.startswith(("gemma2", "gemma3", "qwen3_5", "qwen3_next"))
            and "linear_attn" not in name
        )
        added = 1.0 if adds and not in_tower else 0.0
        return peak * (1.0 + 0.2 * noise) - added
    # GPT-2 stores its matrices as [in, out].
    transposed = model.config.model_type == "gpt2" and ".c_" in name
    fan_in = parameter.shape[0] if transposed else parameter.shape[-1]
    if parameter.dim() > EXPERT_DIMS:  # a convolution over patches
        fan_in = parameter[0].numel()
    peak = LOGIT_STD if name.startswith("lm_head") else 1.0
    return peak * noise / math.sqrt(fan_in)


def _draw_exact(name: str, parameter: Tensor, generator: torch.Generator, model: PreTrainedModel) -> Tensor:
    """Weights with which a pass of the trunk loses nothing in bfloat16.

    Layers add nothing. Entries of an embedding differ in sign alone, as many of each where their number is even, so
    that a final norm in float32 gives signs; their size has all bits of a bfloat16, so that one in bfloat16 does not.
    The logits are then sums of quarters, below 64.
    """
    kind = name.rsplit(".", 2)[-2]
    if kind == "score":
        return _draw(name, parameter, generator, model).bfloat16().float()
    if kind == "lm_head":
        return torch.randint(-2, 3, parameter.shape, generator=generator) / 4
    if kind in ("embed_tokens", "wte"):
        order = torch.rand(parameter.shape, generator=generator).argsort(dim=1)
        size = 1.0 + (2 * torch.randint(0, 64, (len(parameter), 1), generator=generator) + 1) / 128
        return torch.where(order % 2 == 0, size, -size)
    if parameter.dim() == 1 and name.endswith("weight") and not model.config.model_type.startswith("gemma"):
        return torch.ones(parameter.shape)
    adds = kind in ("o_proj", "down_proj", "c_proj", "wpe") or parameter.dim() == 1
    return torch.zeros(parameter.shape) if adds else _draw(name, parameter, generator, model)


def _draw_focused(name: str, parameter: Tensor, generator: torch.Generator, model: PreTrainedModel) -> Tensor:
    """As `_draw_exact`, with queries and keys that are the same for all tokens before rotary positions turn them.

    Their product is then largest at distance 0, by far: a rotation that takes two positions for one adds another
    token's values, which is far off even where bfloat16 rounds.
    """
    kind = name.rsplit(".", 2)[-2]
    exact = _draw_exact(name, parameter, generator, model)
    size = int(
        getattr(model.config, "head_dim", None)
        or model.config.hidden_size // model.config.num_attention_heads
    )
    if kind == "embed_tokens":
        exact[:, 0].abs_()  # the constant that queries and keys are made of
    elif kind in ("q_norm", "k_norm"):
        exact *= math.sqrt(FOCUS / size**0.5)
    elif kind in ("q_proj", "k_proj") and parameter.dim() == 2:
        first = torch.arange(len(exact)) % size < size // 2
        exact.zero_()[first, 0] = math.sqrt(FOCUS * 2 / size**0.5)
    elif kind in ("v_proj", "o_proj") and parameter.dim() == 2 and layer_of(name) == "model.layers.0":
        return _draw(name, parameter, generator, model)
    return exact


def layer_of(name: str) -> str | None:
    """The transformer layer that the parameter ``name`` is in, such as ``model.layers.0``."""
    match = re.match(r"\D*\.\d+(?=\.)", name)
    return None if match is None else match.group()


def _stable_hash(text: str) -> int:
    """The same number in every process, unlike ``hash``."""
    value = 0
    for byte in text.encode():
        value = (value * 131 + byte) % (2**61 - 1)
    return value
