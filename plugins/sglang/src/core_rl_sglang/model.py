"""What the client knows of the served model without asking: its vocabulary, context, stop tokens and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from core_rl.config.engine import ModelConfig
from core_rl.engines.inference import ModelLimits
from core_rl.errors import ConfigError
from core_rl.models.build import read_config
from core_rl.models.written_form import WrittenForm

__all__ = ["ServedModel"]


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model of a directory that servers read too."""

    path: Path
    limits: ModelLimits
    eos: frozenset[int]
    """End-of-sequence tokens, those of the config and of the generation config: SGLang stops at both."""
    shapes: dict[str, tuple[int, ...]]
    """Names and shapes of what an export of it holds."""

    @staticmethod
    def of(model: ModelConfig) -> ServedModel:
        """Read the directory of ``model``; raises `ConfigError` where there is none."""
        if model.path is None:
            raise ConfigError(
                "the engine 'sglang' serves a model directory; set model.path instead of model.config"
            )
        config = read_config(model)
        text = config.get_text_config()
        limits = ModelLimits(
            vocab_size=text.vocab_size, context_length=getattr(text, "max_position_embeddings", None)
        )
        path = Path(model.path).expanduser().resolve()
        return ServedModel(path=path, limits=limits, eos=_eos(config, path), shapes=_shapes(config))


def _eos(config: PretrainedConfig, path: Path) -> frozenset[int]:
    found = [getattr(config.get_text_config(), "eos_token_id", None)]
    if (path / "generation_config.json").is_file():
        found.append(GenerationConfig.from_pretrained(path).eos_token_id)
    tokens: set[int] = set()
    for value in found:
        tokens |= set() if value is None else {value} if isinstance(value, int) else set(value)
    return frozenset(tokens)


def _shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Written names and shapes of the parameters, each once, and of the buffers that are saved with them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = {name: tuple(value.shape) for name, value in model.named_parameters()}
    saved = model.state_dict().keys()
    buffers = {name: tuple(value.shape) for name, value in model.named_buffers() if name in saved}
    return WrittenForm.of(model).shapes(parameters) | buffers
