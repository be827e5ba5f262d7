"""Buckets of weights as SGLang's workers unpickle them."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from core_rl.weight_sync.buckets import start_of
from core_rl.weight_sync.device_memory import Opened
from core_rl.weight_sync.messages import Bucket, pickled_by_name

__all__ = ["flattened_bucket"]


def flattened_bucket(bucket: Bucket, flat: Tensor | Opened) -> bytes:
    """``bucket`` as one buffer ``flat`` [n] of uint8, with names, shapes and places: SGLang's ``flattened_bucket``.

    SGLang (0.5.23) reads the attributes of its own class, which this environment lacks, and unpickles namespaces.
    """
    metadata = [
        SimpleNamespace(
            name=name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            start_idx=(start := start_of(tensor)),
            end_idx=start + tensor.nbytes,
            numel=tensor.nbytes,
        )
        for name, tensor in bucket
    ]
    return pickled_by_name({"flattened_tensor": flat, "metadata": metadata})
