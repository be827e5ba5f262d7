"""Adapters (LoRA) in vLLM's format, which is that of ``peft``."""

from __future__ import annotations

from pathlib import Path

from transformers import PretrainedConfig

from core_rl.config.engine import LoraConfig
from core_rl.errors import ConfigError
from core_rl.servers.adapters import AdapterForm, require_taken
from core_rl.toolkit.lora import adapter_shapes

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The most that the rank of an adapter may be, of which a server is given one."""
HELD = 8
"""Adapters that a server holds: one for each version that a request in flight may have begun with."""


class VllmAdapterForm(AdapterForm):
    """The adapters of one kind over one model."""

    @staticmethod
    def of(lora: LoraConfig, path: Path, config: PretrainedConfig) -> VllmAdapterForm:
        """The form of ``lora`` over the model in ``path``; raises `ConfigError` for adapters vLLM does not take."""
        shapes = adapter_shapes(config, lora)
        require_taken(shapes, "vLLM")
        if lora.rank > RANKS[-1]:
            raise ConfigError(f"model.lora.rank = {lora.rank}, and vLLM takes {RANKS[-1]} at most")
        return VllmAdapterForm(lora=lora, base=str(path), shapes=shapes)

    def arguments(self) -> list[str]:
        """Command-line arguments of a server that loads such adapters."""
        most = min(rank for rank in RANKS if rank >= self.lora.rank)
        return ["--enable-lora", "--max-lora-rank", str(most), "--max-loras", str(HELD)]
