"""A digest of tensors that does not depend on how they are sharded, or whether they are in files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.distributed.comm import Comm
from core_rl.state.digest import digest_of_parts
from core_rl.toolkit.checkpoint_layout import WrittenForm

__all__ = ["digest_of_directory"]


def digest_of_directory(directory: Path, config: PretrainedConfig) -> str:
    """The digest of the language model with ``config`` in ``directory``, as an engine that holds it gives it."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    form, files = WrittenForm.of(model), TensorFiles(directory, "model")

    def parts() -> Iterator[tuple[str, Tensor]]:
        for held, _ in model.named_parameters():
            yield held, torch.cat([files.read(name).float().flatten() for name in form.names(held)])

    return digest_of_parts(Comm(), parts())
