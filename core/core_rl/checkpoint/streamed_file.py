"""A safetensors file that is written tensor by tensor, so that no more than one is held in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core_rl.errors import CheckpointError

__all__ = ["StreamedFile"]

HEADER_BYTES = 64 * 2**10
"""What is kept free at the beginning of a file; the format lets a header end in spaces. Room for some 500 tensors."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class StreamedFile:
    """The format: the length of the header (8 bytes, little endian), the header as JSON, then all data without gaps.

    The header comes first and names everything, so its place is left free and filled at the end. A
    file that was not finished cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = 0
        """Bytes of tensors so far."""
        self._entries: dict[str, Any] = {}
        self._header_bytes = 0
        try:
            self._stream = path.open("wb")
            self._stream.seek(HEADER_BYTES)
        except OSError as error:
            raise self._failed(error) from error

    @property
    def names(self) -> list[str]:
        """The tensors so far, in order."""
        return [name for name in self._entries if name != "__metadata__"]

    def add(self, name: str, tensor: Tensor) -> bool:
        """Write ``tensor``; False, with nothing written, if the file must end here.

        That is so when its header is full, and for a tensor that would begin at an odd place for its
        dtype, which readers refuse. The first tensor of a file always fits. Raises
        `CheckpointError` for a dtype that the format does not have, and if the disk refuses.
        """
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{name!r} is {tensor.dtype}, which safetensors files do not hold")
        entry = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.written, self.written + tensor.nbytes],
        }
        size = len(json.dumps({name: entry}).encode())
        if self._entries and (
            self.written % tensor.element_size() or self._header_bytes + size > HEADER_BYTES - 1024
        ):
            return False
        self._write(tensor)
        self._entries[name] = entry
        self._header_bytes += size
        self.written += tensor.nbytes
        return True

    def finish(self, metadata: dict[str, str]) -> None:
        """Write the header and close the file."""
        header = json.dumps({"__metadata__": metadata, **self._entries}).encode().ljust(HEADER_BYTES - 8)
        assert len(header) == HEADER_BYTES - 8
        try:
            self._stream.seek(0)
            self._stream.write(len(header).to_bytes(8, "little") + header)
            self._stream.close()
        except OSError as error:
            raise self._failed(error) from error

    def abandon(self) -> None:
        """Close the file as it is."""
        self._stream.close()

    def _write(self, tensor: Tensor) -> None:
        data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        try:
            # Tensor.numpy() would pin the size of the storage behind it, so that it could not be offloaded any more.
            self._stream.write(np.from_dlpack(data).data)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.path.name}: {error.strerror or error}")
