"""Products of the head in bfloat16, by which operators are called; on CUDA float32 sums, shown on the meta device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core_rl.toolkit.token_logprobs import CUDA_CHUNK_ROWS, chunk_rows, token_logprobs

ROWS, HIDDEN, VOCABULARY = 12, 8, 40
BFLOAT16 = torch.bfloat16
Shape = tuple[int, ...]


class Products(TorchDispatchMode):
    """Notes each matrix product, with the dtype of its result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, torch.dtype, Shape]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.found.append((str(func).removeprefix("aten."), result.dtype, tuple(result.shape)))
        return result


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_logits_and_head_gradient_sum_in_float32(
    with_entropy: bool, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core_rl.toolkit.cuda.on_cuda", lambda tensor: True)
    monkeypatch.setattr("core_rl.toolkit.token_logprobs.GROUP_ROWS", 1)
    products = products_of(torch.device("meta"), with_entropy, chunk=ROWS // groups)
    logits = ("mm.dtype_out", torch.float32, (ROWS // groups, VOCABULARY))
    gradients = [
        ("mm.out", BFLOAT16, (ROWS // groups, HIDDEN)),
        ("addmm.dtype_out", torch.float32, (VOCABULARY, HIDDEN)),
    ]
    assert products == groups * [logits] + groups * [logits, *gradients]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_half_precision_chunks_share_a_head_product(with_entropy: bool) -> None:
    """Each would write as much as the head has, and read and write twice as much where it adds to a float32 sum."""
    products = products_of(torch.device("cpu"), with_entropy, chunk=ROWS // 3)
    outputs = Counter(shape for _, _, shape in products)
    # Logits of the chunks, in the forward pass and again.
    assert outputs == {(ROWS // 3, VOCABULARY): 6, (ROWS, HIDDEN): 1, (VOCABULARY, HIDDEN): 1}
    assert {dtype for _, dtype, _ in products} == {BFLOAT16}


def products_of(device: torch.device, with_entropy: bool, chunk: int) -> list[tuple[str, torch.dtype, Shape]]:
    """Products of log-probs and their gradients, in bfloat16."""
    hidden = torch.zeros(ROWS, HIDDEN, device=device, dtype=BFLOAT16, requires_grad=True)
    weight = torch.zeros(VOCABULARY, HIDDEN, device=device, dtype=BFLOAT16, requires_grad=True)
    targets = torch.zeros(ROWS, dtype=torch.long, device=device)
    with Products() as products:
        logprobs, _ = token_logprobs(
            hidden, weight, targets, with_entropy=with_entropy, chunk=chunk, keep_bytes=0
        )
        logprobs.sum().backward()
    actual: list[tuple[str, torch.dtype, Shape]] = products.found
    return actual


def test_cuda_computes_more_rows_at_once() -> None:
    row = 4 * 151_936
    assert chunk_rows(row, on_cpu=False) == CUDA_CHUNK_ROWS > chunk_rows(row, on_cpu=True)
