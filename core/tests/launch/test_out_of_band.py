"""Objects whose tensors are sent out of band."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from core_rl.data.batch import SequenceBatch
from core_rl.distributed.channel import Buffer
from core_rl.launch.messages import SMALLEST_BYTES, packed, unpacked

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)
LARGE = SMALLEST_BYTES // 4


def sent(parts: Sequence[Buffer]) -> list[Buffer]:
    """Copies, as a receiver has them."""
    return [memoryview(bytearray(part)) for part in parts]


def address(part: Buffer) -> int:
    return np.frombuffer(part, dtype=np.uint8).ctypes.data


@given(st.lists(st.integers(0, 40), max_size=3), st.sampled_from(DTYPES), st.booleans())
def test_any_tensor_comes_back_as_it_was(shape: list[int], dtype: torch.dtype, transposed: bool) -> None:
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(dtype)
    value = tensor.mT if transposed and len(shape) > 1 else tensor
    actual = unpacked(sent(packed({"a": value, "b": [1, "two"]})))
    assert actual["b"] == [1, "two"]
    assert actual["a"].dtype == dtype and actual["a"].shape == value.shape
    assert torch.equal(actual["a"], value)
    actual["a"].zero_()  # its memory is its own


def test_large_tensors_are_not_copied() -> None:
    large, small = torch.randn(2, LARGE), torch.randn(3)
    stream, *buffers = packed([large, small, np.zeros(LARGE)])
    assert [memoryview(buffer).nbytes for buffer in buffers] == [large.nbytes, 8 * LARGE]
    assert address(buffers[0]) == large.data_ptr()
    assert memoryview(stream).nbytes < 2000
    received = sent([stream, *buffers])
    assert unpacked(received)[0].data_ptr() == address(received[1])


COLLECTED = """
import gc
from core_rl.launch.messages import packed
parts = packed(["a message"])
parts += [parts, parts[0][3:]]  # a cycle, as a traceback's frame makes one, of a view of a view
del parts
gc.collect()
"""


def test_a_message_in_a_cycle_is_collected() -> None:
    """Python 3.12.1 dies where a view exported by `io.BytesIO` is collected, and 3.13 complains."""
    result = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_stream_of_a_message_exports_no_buffer() -> None:
    stream = memoryview(packed(["a message"])[0])
    assert isinstance(stream.obj, bytes)


def test_views_are_sent_without_their_base() -> None:
    row = torch.randn(100, LARGE)[7]
    parts = packed([row, row])
    assert [memoryview(part).nbytes for part in parts[1:]] == [row.nbytes]
    first, second = unpacked(sent(parts))
    assert first is second and torch.equal(first, row)


def test_a_batch_keeps_its_fields() -> None:
    batch = SequenceBatch.from_sequences(
        [range(LARGE), range(5)], tokens={"advantages": [torch.randn(LARGE), torch.randn(5)]}
    )
    actual = unpacked(sent(packed(batch)))
    assert torch.equal(actual.input_ids, batch.input_ids)
    assert torch.equal(actual["advantages"], batch["advantages"])
    assert torch.equal(actual.loss_mask, batch.loss_mask)


SPECIAL: dict[str, Any] = {
    "trained": torch.randn(LARGE, requires_grad=True),
    "parameter": nn.Parameter(torch.randn(LARGE)),
    "sparse": torch.eye(3).to_sparse(),
    "conjugated": torch.randn(LARGE, dtype=torch.complex64).conj(),
    "meta": torch.empty(LARGE, device="meta"),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_unusual_tensors_are_pickled_by_torch(name: str) -> None:
    tensor: Tensor = SPECIAL[name]
    actual = unpacked(sent(packed(tensor)))
    assert type(actual) is type(tensor) and actual.requires_grad == tensor.requires_grad
    assert actual.device == tensor.device and actual.layout == tensor.layout
    if tensor.device.type == "cpu":
        assert torch.equal(actual.to_dense(), tensor.to_dense())
