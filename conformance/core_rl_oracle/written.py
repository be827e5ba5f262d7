"""Names and tensors as ``save_pretrained`` writes them: transformers 5 fuses experts in memory and writes each one.

Written out for the layout that the suite's mixture of experts has, and sharing nothing with the core.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

__all__ = ["layer_of", "overwrite", "written"]


def written(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Written names and views of the parameter-shaped ``value`` that a module holds under ``name``.

    Fused gates and ups are ``[experts, gates then ups, hidden]``, downs ``[experts, hidden, intermediate]``.
    """
    prefix, found, part = name.partition(".experts.")
    if not found:
        yield name, value
        return
    for expert, matrix in enumerate(value):
        if part == "gate_up_proj":
            half = len(matrix) // 2
            yield f"{prefix}.experts.{expert}.gate_proj.weight", matrix[:half]
            yield f"{prefix}.experts.{expert}.up_proj.weight", matrix[half:]
        else:
            yield f"{prefix}.experts.{expert}.{part}.weight", matrix


def overwrite(local: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Set the ``local`` tensors in place to ``values``, which have checkpoint names."""
    for name, tensor in local.items():
        for own, view in written(name, tensor):
            if own in values:
                view.copy_(values[own])


def layer_of(name: str) -> str | None:
    """The transformer layer that the parameter ``name`` is in, such as ``model.layers.0``."""
    found = re.match(r"\D*\.\d+(?=\.)", name)
    return None if found is None else found.group()
