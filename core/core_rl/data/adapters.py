"""To and from other forms: padded tensors, verl's TensorDict, AReaL's padded dictionary, and safetensors files."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from core_rl.data.batch import SequenceBatch
from core_rl.errors import BatchError

__all__ = [
    "TensorDictLike",
    "from_padded",
    "from_padded_dict",
    "from_tensordict",
    "load_batch",
    "pad_tokens",
    "save_batch",
    "to_padded",
    "to_padded_dict",
    "to_tensordict",
]


Side = Literal["left", "right"]


class TensorDictLike(Protocol):
    """The part of ``tensordict.TensorDict`` that `from_tensordict` reads; the package need not be installed."""

    def keys(self) -> Iterable[str]: ...

    def __getitem__(self, key: str) -> Tensor: ...


def from_padded(
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    tokens: Mapping[str, Tensor] | None = None,
    sequences: Mapping[str, Tensor] | None = None,
    unit: Tensor | None = None,
) -> SequenceBatch:
    """Pack ``input_ids [B, L]`` where ``attention_mask [B, L]`` is 1; padding may stand on either side.

    ``tokens`` are ``[B, L, ...]``. Raises `BatchError` for wrong shapes and for a mask with a hole.
    """
    shape = input_ids.shape
    if input_ids.dim() != 2 or attention_mask.shape != shape:
        raise BatchError(
            f"input_ids {list(shape)} and attention_mask {list(attention_mask.shape)} must both be [B, L]"
        )
    for name, value in (tokens or {}).items():
        if value.shape[:2] != shape:
            raise BatchError(
                f"token field {name!r} must be [B={shape[0]}, L={shape[1]}, ...]; got {list(value.shape)}"
            )
    keep = attention_mask.bool()
    holes = (keep[:, 1:] & ~keep[:, :-1]).sum(1) + keep[:, 0].long() > 1
    if holes.any():
        raise BatchError(
            f"attention_mask of sequence {int(holes.nonzero()[0])} has a hole; pad on one side only"
        )
    lengths = keep.sum(1).to("cpu", torch.int32)
    return SequenceBatch(
        input_ids=input_ids[keep],
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)]),
        tokens={name: value[keep] for name, value in (tokens or {}).items()},
        sequences=dict(sequences or {}),
        unit=unit,
    )


def pad_tokens(values: Tensor, batch: SequenceBatch, *, side: Side = "right", fill: float = 0) -> Tensor:
    """A token field ``[T, ...]`` of ``batch`` as ``[B, L, ...]``, with ``fill`` in the padding."""
    if not batch.num_sequences:
        return values.new_zeros((0, 0, *values.shape[1:]))
    rows = list(values.split(batch.lengths))
    return pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)


def to_padded(batch: SequenceBatch, *, side: Side = "right", pad_id: int = 0) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` (int64 ``[B, L]``) and all token fields ``[B, L, ...]``.

    Raises `BatchError` for a batch with images, whose tensors have no padded form.
    """
    if pictured := sum(bool(media) for media in batch.media):
        raise BatchError(
            f"{pictured} of {batch.num_sequences} sequences have images, which padded tensors cannot hold; pass the "
            "SequenceBatch itself, or write it with save_batch()"
        )
    mask = pad_tokens(torch.ones_like(batch.input_ids), batch, side=side)
    padded = {
        "input_ids": pad_tokens(batch.input_ids, batch, side=side, fill=pad_id),
        "attention_mask": mask,
    }
    return padded | {name: pad_tokens(value, batch, side=side) for name, value in batch.tokens.items()}


def from_padded_dict(data: Mapping[str, Tensor]) -> SequenceBatch:
    """Pack AReaL's dictionary: ``input_ids`` and ``attention_mask`` ``[B, L]`` and more fields.

    A field ``[B, L, ...]`` is a token field and any other ``[B, ...]`` a sequence field.
    """
    missing = [name for name in ("input_ids", "attention_mask") if name not in data]
    if missing:
        raise BatchError(f"a padded dictionary needs {missing}; it has {sorted(data)}")
    ids, mask = data["input_ids"], data["attention_mask"]
    tokens: dict[str, Tensor] = {}
    sequences: dict[str, Tensor] = {}
    for name, value in data.items():
        if name not in ("input_ids", "attention_mask", "position_ids"):
            (tokens if value.shape[:2] == ids.shape else sequences)[name] = value
    unit = sequences.pop("unit", None)
    return from_padded(ids, mask, tokens=tokens, sequences=sequences, unit=unit)


def to_padded_dict(batch: SequenceBatch, *, side: Side = "right", pad_id: int = 0) -> dict[str, Tensor]:
    """AReaL's padded dictionary; ``unit``, where there is one, is a sequence field."""
    padded = to_padded(batch, side=side, pad_id=pad_id) | dict(batch.sequences)
    return padded if batch.unit is None else padded | {"unit": batch.unit}


def from_tensordict(data: TensorDictLike) -> SequenceBatch:
    """Pack verl's TensorDict, whose fields are padded or nested (jagged) tensors.

    ``responses`` and ``prompts``, which repeat ``input_ids``, are left out; ``response_mask [B, R]``
    becomes ``loss_mask`` at the last ``R`` positions.
    """
    fields = {name: data[name] for name in data.keys() if name != "prompts"}  # noqa: SIM118
    responses, ids = fields.pop("responses", None), fields.get("input_ids")
    if ids is not None and ids.is_nested:
        return _from_nested(fields)
    if ids is not None and responses is not None and responses.shape[1] != ids.shape[1]:
        for name in [name for name, value in fields.items() if value.shape[:2] == responses.shape[:2]]:
            value = fields.pop(name)
            full = value.new_zeros((ids.shape[0], ids.shape[1], *value.shape[2:]))
            full[:, ids.shape[1] - value.shape[1] :] = value
            fields["loss_mask" if name == "response_mask" else name] = full
    return from_padded_dict(fields)


def to_tensordict(batch: SequenceBatch) -> Any:
    """A ``tensordict.TensorDict`` with right-padded fields; needs ``pip install tensordict``."""
    try:
        tensordict = importlib.import_module("tensordict")
    except ModuleNotFoundError as error:
        raise BatchError("to_tensordict needs the package tensordict; pip install tensordict") from error
    return tensordict.TensorDict(to_padded_dict(batch), batch_size=[batch.num_sequences])


def _from_nested(fields: Mapping[str, Tensor]) -> SequenceBatch:
    ids = fields["input_ids"]
    offsets: Tensor = ids.offsets()  # type: ignore[attr-defined]  # nested tensors have it
    tokens = {
        n: v.values() for n, v in fields.items() if v.is_nested and n not in ("input_ids", "position_ids")
    }
    sequences = {n: v for n, v in fields.items() if not v.is_nested}
    return SequenceBatch(
        input_ids=ids.values(), cu_seqlens=offsets.to("cpu", torch.int32), tokens=tokens, sequences=sequences
    )


SEPARATOR = "/"


def save_batch(batch: SequenceBatch, path: Path) -> None:
    """Write ``batch`` to ``path``, shared images once; its meta fields must be JSON. Raises `BatchError` otherwise."""
    try:
        meta = json.dumps(dict(batch.meta))
    except (TypeError, ValueError) as error:
        raise BatchError(f"a meta field of the batch is not JSON: {error}; drop or convert it") from error
    tensors = {"input_ids": batch.input_ids, "cu_seqlens": batch.cu_seqlens}
    tensors |= {f"tokens{SEPARATOR}{name}": value for name, value in batch.tokens.items()}
    tensors |= {f"sequences{SEPARATOR}{name}": value for name, value in batch.sequences.items()}
    if batch.unit is not None:
        tensors["unit"] = batch.unit
    distinct = list({id(media): media for media in batch.media}.values())
    numbers = {id(media): number for number, media in enumerate(distinct)}
    for number, media in enumerate(distinct):
        # Clones, as safetensors refuses tensors that share memory.
        tensors |= {
            SEPARATOR.join(("media", str(number), name)): value.clone() for name, value in media.items()
        }
    metadata = {"meta": meta, "media": json.dumps([numbers[id(media)] for media in batch.media])}
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata=metadata)


def load_batch(path: Path) -> SequenceBatch:
    """Read what `save_batch` wrote, on the CPU. Raises `BatchError` for a damaged file."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
            meta, media = (
                json.loads(metadata.get(name, empty)) for name, empty in (("meta", "{}"), ("media", "[]"))
            )
    except (SafetensorError, OSError) as error:
        raise BatchError(f"{path} is not a batch file: {error}") from error

    def part(prefix: str) -> dict[str, Tensor]:
        start = prefix + SEPARATOR
        return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}

    distinct = [part(f"media{SEPARATOR}{number}") for number in range(max(media, default=-1) + 1)]
    return SequenceBatch(
        input_ids=tensors["input_ids"],
        cu_seqlens=tensors["cu_seqlens"],
        tokens=part("tokens"),
        sequences=part("sequences"),
        meta=meta,
        media=tuple(distinct[number] for number in media),
        unit=tensors.get("unit"),
    )
