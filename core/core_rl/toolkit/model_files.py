"""Safetensors files of ``model.path``, compared with the module that is built from them."""

from __future__ import annotations

from pathlib import Path

from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.config.engine import ModelConfig
from core_rl.errors import CheckpointError, CheckpointNotFound, ConfigError

__all__ = ["model_files"]

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def model_files(model: ModelConfig) -> TensorFiles:
    """The files of ``model.path``; raises `ConfigError` for damaged ones, and where all weights are pickled."""
    directory = Path(model.path or "")
    try:
        return TensorFiles(directory, "model")
    except CheckpointNotFound as error:
        pickled = sorted(path.name for pattern in PICKLED for path in directory.glob(pattern))
        reason = "there are no weights in it"
        if pickled:
            reason = (
                f"its weights are pickled ({', '.join(pickled[:3])}), and unpickling can run any code; load it once "
                "in transformers and call save_pretrained(), which writes safetensors"
            )
        raise ConfigError(f"the model {model.path!r} cannot be built: {reason} ({error})") from error
    except CheckpointError as error:
        raise ConfigError(f"the model {model.path!r} cannot be built: {error}") from error
