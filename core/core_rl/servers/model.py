"""Properties of the served model that need no server: its vocabulary, context, stop tokens and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import PretrainedConfig

from core_rl.backend.inference_backend import ModelLimits
from core_rl.checkpoint.end_tokens import end_tokens
from core_rl.config.engine import ModelConfig
from core_rl.errors import ConfigError
from core_rl.servers.adapters import AdapterForm
from core_rl.toolkit.build import read_config
from core_rl.toolkit.meta_build import digest_of_directory
from core_rl.toolkit.model_files import exported_shapes

__all__ = ["ServedModel"]


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model of a directory that servers read too."""

    path: Path
    limits: ModelLimits
    eos: frozenset[int]
    """End tokens of config, generation config and tokenizer."""
    shapes: dict[str, tuple[int, ...]]
    """Names and shapes of the tensors of an export."""
    config: PretrainedConfig
    adapter: AdapterForm | None = None
    """The form of adapters over it; None where servers take none."""

    @staticmethod
    def of(model: ModelConfig, engine: str) -> ServedModel:
        """Read the directory of ``model`` for ``engine``; raises `ConfigError` where there is none."""
        if model.path is None:
            raise ConfigError(
                f"the engine {engine!r} serves a model directory; set model.path instead of model.config"
            )
        config = read_config(model)
        path = Path(model.path).expanduser().resolve()
        return ServedModel(
            path=path,
            limits=ModelLimits.of(config),
            eos=frozenset(end_tokens(config, path)),
            shapes=exported_shapes(model),
            config=config,
        )

    @cached_property
    def digest(self) -> str:
        """The digest of its weights, as a train engine computes it for the base of an adapter."""
        return digest_of_directory(self.path, self.config)
