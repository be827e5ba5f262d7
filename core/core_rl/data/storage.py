"""A batch as one safetensors file: tensors as they are, the rest as JSON in its header."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from core_rl.data.batch import SequenceBatch
from core_rl.errors import BatchError

__all__ = ["load_batch", "save_batch"]

SEPARATOR = "/"


def save_batch(batch: SequenceBatch, path: Path) -> None:
    """Write ``batch`` to ``path``; its meta fields must be JSON. Raises `BatchError` otherwise."""
    try:
        meta = json.dumps(dict(batch.meta))
    except (TypeError, ValueError) as error:
        raise BatchError(f"a meta field of the batch is not JSON: {error}; drop or convert it") from error
    tensors = {"input_ids": batch.input_ids, "cu_seqlens": batch.cu_seqlens}
    tensors |= {f"tokens{SEPARATOR}{name}": value for name, value in batch.tokens.items()}
    tensors |= {f"sequences{SEPARATOR}{name}": value for name, value in batch.sequences.items()}
    if batch.unit is not None:
        tensors["unit"] = batch.unit
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata={"meta": meta})


def load_batch(path: Path) -> SequenceBatch:
    """Read what `save_batch` wrote, on the CPU. Raises `BatchError` for a damaged file."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            meta = json.loads((file.metadata() or {}).get("meta", "{}"))
    except (SafetensorError, OSError) as error:
        raise BatchError(f"{path} is not a batch file: {error}") from error

    def part(prefix: str) -> dict[str, Tensor]:
        start = prefix + SEPARATOR
        return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}

    return SequenceBatch(
        input_ids=tensors["input_ids"],
        cu_seqlens=tensors["cu_seqlens"],
        tokens=part("tokens"),
        sequences=part("sequences"),
        meta=meta,
        unit=tensors.get("unit"),
    )
