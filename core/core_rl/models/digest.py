"""A digest of tensors that does not depend on how they are sharded, or whether they are in files."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from core_rl.checkpoint.tensor_files import TensorFiles
from core_rl.engines.collectives import World
from core_rl.models.written_form import WrittenForm

__all__ = ["digest_of_directory", "digest_of_parts"]


def digest_of_parts(world: World, parts: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of float tensors, of which the ranks hold ``parts``, each element on one of them; collective.

    It is made from the sum of each tensor's bits as integers, so nothing is gathered. It tells trained
    weights from others; a permutation within a tensor keeps it.
    """
    own = {name: int(_bits(part).sum(dtype=torch.int64)) for name, part in parts}
    totals: Counter[str] = Counter()
    for sums in world.gather(own):
        totals.update(sums)
    return hashlib.sha256(json.dumps(sorted(totals.items())).encode()).hexdigest()[:32]


def digest_of_directory(directory: Path, config: PretrainedConfig) -> str:
    """The digest of the language model with ``config`` in ``directory``, as an engine that holds it gives it."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    form, files = WrittenForm.of(model), TensorFiles(directory, "model")

    def parts() -> Iterator[tuple[str, Tensor]]:
        for held, _ in model.named_parameters():
            yield held, torch.cat([files.read(name).float().flatten() for name in form.names(held)])

    return digest_of_parts(World(), parts())


def _bits(part: Tensor) -> Tensor:
    return part.detach().float().contiguous().view(torch.int32)
