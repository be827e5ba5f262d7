"""A digest of tensors that does not depend on how they are sharded, or whether they are in files."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.distributed.comm import Comm
from core_rl.state.digest import digest_of_parts
from core_rl.toolkit.checkpoint_layout import CheckpointLayout

__all__ = ["digest_of_directory"]


def digest_of_directory(directory: Path, config: PretrainedConfig) -> str:
    """The digest of the weights in ``directory`` of a model with ``config``, as an engine with these weights has it."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    layout, files = CheckpointLayout.of(model), TensorFiles(directory, "model")
    names = (name for parameter, _ in model.named_parameters() for name in layout.names(parameter))
    return digest_of_parts(Comm(), ((name, files.read(name)) for name in names))
