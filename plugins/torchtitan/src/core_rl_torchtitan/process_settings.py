"""Settings of torchtitan that hold for a whole process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def device_type(name: str) -> Iterator[None]:
    """Let torchtitan make meshes of the device type ``name`` inside the context.

    It decides at import (tools/utils.py), for "cuda" where there is no accelerator.
    """
    from torchtitan.distributed import parallel_dims

    decided = parallel_dims.device_type
    parallel_dims.device_type = name
    try:
        yield
    finally:
        parallel_dims.device_type = decided
