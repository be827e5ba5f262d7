"""Named tensors as safetensors files in the layout that transformers writes and reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from core_rl.checkpoint.model_files import indexed_tensors
from core_rl.distributed.agreement import describe, error_of
from core_rl.errors import CheckpointDamaged, CheckpointError, WeightsError

MAX_FILE_BYTES = 2 * 2**30
"""Size of a file of an export, in bytes; the writer keeps one file in host memory."""
MAPPED_BYTES = 256 * 2**20
"""Bytes of a file that are read before it is mapped anew; see `SafetensorsFile`."""


def write_tensors(
    directory: Path,
    prefix: str,
    stream: Iterable[tuple[str, Tensor | None]],
    *,
    writes: bool,
    max_file_bytes: int | None = None,
) -> None:
    """Write ``stream`` to ``PREFIX.safetensors``, or to ``PREFIX-00001-of-0000N.safetensors`` with an index.

    The stream may be collective: it is consumed to its end on every rank, also after an error, and
    only ranks where ``writes`` is true receive tensors and write. They keep at most ``max_file_bytes`` in host
    memory (`MAX_FILE_BYTES` for None), or one tensor if that is larger. Raises `CheckpointError` with the first
    error of this rank.
    """
    writer = _Writer(directory, prefix, max_file_bytes or MAX_FILE_BYTES)
    failure: Exception | None = None
    for name, tensor in stream:
        if writes and failure is None:
            failure = error_of(partial(writer.add, name, tensor))
    if writes and failure is None:
        failure = error_of(writer.finish)
    if failure is not None:
        raise CheckpointError(describe(failure)) from failure


class _Writer:
    """Collects tensors, and writes a file whenever they fill one."""

    def __init__(self, directory: Path, prefix: str, max_file_bytes: int) -> None:
        self._directory = directory
        self._prefix = prefix
        self._limit = max_file_bytes
        self._tensors: dict[str, Tensor] = {}
        self._collected = 0
        self._total = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor | None) -> None:
        if tensor is None:
            raise CheckpointError(f"the export gave no data for {name!r} on the rank that writes")
        if name in self._tensors or any(name in names for names in self._files):
            raise CheckpointError(f"the export gave {name!r} twice")
        if self._tensors and self._collected + tensor.nbytes > self._limit:
            self._write()
        # A copy: the tensor is valid until the next one, and safetensors refuses shared memory.
        self._tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        self._collected += tensor.nbytes

    def finish(self) -> None:
        if self._tensors or not self._files:
            self._write()
        if len(self._files) == 1:
            self._path(1).rename(self._directory / f"{self._prefix}.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files, start=1):
            target = f"{self._prefix}-{number:05d}-of-{len(self._files):05d}.safetensors"
            self._path(number).rename(self._directory / target)
            weight_map |= dict.fromkeys(names, target)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._directory / f"{self._prefix}.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n"
        )

    def _write(self) -> None:
        self._files.append(list(self._tensors))
        write_file(self._path(len(self._files)), self._tensors, {"format": "pt"})
        self._total += self._collected
        self._tensors, self._collected = {}, 0

    def _path(self, number: int) -> Path:
        return self._directory / f"{self._prefix}-{number:05d}.safetensors"


def write_file(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """One safetensors file; a `CheckpointError` with its name if it cannot be written."""
    try:
        save_file(tensors, file, metadata=metadata)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file.name}: {describe(error)}") from error


class SafetensorsFile:
    """One safetensors file, read tensor by tensor. Unpickled, it opens when it is first read.

    It is mapped, and pages that were read count as memory of this process: after `MAPPED_BYTES` it is mapped anew.
    """

    _mapped: int = 0
    """Bytes of pages that were read."""
    _identity: tuple[int, int] | None = None

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._path = path
        self._opened: Any = self._open()

    @property
    def _file(self) -> Any:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def _open(self) -> Any:
        self._mapped, self._identity = 0, _identity(self._path)
        try:
            return safe_open(self._path, framework="pt")
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"{self.name}: missing") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointDamaged(f"{self.name}: {describe(error)}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_path": self._path, "_opened": None}

    @property
    def metadata(self) -> dict[str, str]:
        """The strings in the file's header."""
        return dict(self._file.metadata() or {})

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(key).get_shape())

    def is_bfloat16(self, key: str) -> bool:
        """Whether ``key`` is stored in bfloat16."""
        return bool(self._file.get_slice(key).get_dtype() == "BF16")

    def read(self, key: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """``key`` on the CPU, contiguous, whole or the part that ``slices`` names."""
        if self._mapped > MAPPED_BYTES and _identity(self._path) == self._identity:
            self._opened = None
        part: Tensor
        if not slices:
            part = self._file.get_tensor(key)
        elif 0 in self.shape(key):
            part = self._file.get_tensor(key)[slices]
        else:
            part = self._file.get_slice(key)[slices]
        # Rows in whole: columns are read from the same pages.
        rows = part.shape[0] if part.dim() else 1
        self._mapped += rows * torch.Size(self.shape(key)[1:]).numel() * part.element_size()
        return part.contiguous()


def _identity(path: Path) -> tuple[int, int] | None:
    """Inode and time of a file, which another file would not have; None for a missing file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


class TensorFiles:
    """A `TensorSource` over what `write_tensors` or transformers' ``save_pretrained`` (prefix ``model``) wrote.

    Raises `CheckpointNotFound` if there are no such files in ``directory``, and `CheckpointDamaged`
    with the name of a file that is missing or cannot be read.
    """

    def __init__(self, directory: Path, prefix: str) -> None:
        self._place = f"{directory}/{prefix}"
        weight_map = indexed_tensors(directory, prefix)
        if weight_map is not None:
            files = {name: SafetensorsFile(directory / name) for name in sorted(set(weight_map.values()))}
            self._files = {name: files[file] for name, file in weight_map.items()}
        else:
            file = SafetensorsFile(directory / f"{prefix}.safetensors")
            self._files = dict.fromkeys(file.keys(), file)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, file in self._files.items():
            try:
                self._shapes[name] = file.shape(name)
            except SafetensorError as error:
                raise CheckpointDamaged(
                    f"{file.name}: {describe(error)}, which the index says is there"
                ) from error

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        self._check(name)
        return self._shapes[name]

    def is_bfloat16(self, name: str) -> bool:
        """Whether ``name`` is stored in bfloat16."""
        self._check(name)
        return self._files[name].is_bfloat16(name)

    def file_of(self, name: str) -> str:
        """The name of the file that holds ``name``."""
        self._check(name)
        return self._files[name].name

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """The tensor ``name`` on the CPU, or the part of it that ``slices`` names, one for each dimension."""
        self._check(name)
        return self._files[name].read(name, slices)

    def _check(self, name: str) -> None:
        if name not in self._files:
            raise WeightsError(f"{self._place} holds no tensor {name!r}")
