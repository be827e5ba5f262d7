"""Products of the head on CUDA: float32 sums of bfloat16 factors, by which operators are called on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core_rl.toolkit.token_logprobs import CUDA_CHUNK_ROWS, chunk_rows, token_logprobs

ROWS, HIDDEN, VOCABULARY = 12, 8, 40
BFLOAT16 = torch.bfloat16


class Products(TorchDispatchMode):
    """Notes each matrix product, with the dtype of its result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.found.append((str(func).removeprefix("aten."), result.dtype, tuple(result.shape)))
        return result


@pytest.mark.parametrize("with_entropy", [False, True])
def test_logits_and_the_gradient_of_the_head_are_float32_sums(
    with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core_rl.toolkit.cuda.on_cuda", lambda tensor: True)
    hidden = torch.empty(ROWS, HIDDEN, device="meta", dtype=BFLOAT16, requires_grad=True)
    weight = torch.empty(VOCABULARY, HIDDEN, device="meta", dtype=BFLOAT16, requires_grad=True)
    targets = torch.empty(ROWS, dtype=torch.long, device="meta")
    with Products() as products:
        logprobs, _ = token_logprobs(hidden, weight, targets, with_entropy=with_entropy, keep_bytes=0)
        logprobs.sum().backward()
    logits = ("mm.dtype_out", torch.float32, (ROWS, VOCABULARY))
    gradients = [
        ("mm.out", BFLOAT16, (ROWS, HIDDEN)),
        ("addmm.dtype_out", torch.float32, (VOCABULARY, HIDDEN)),
    ]
    assert products.found == [logits, logits, *gradients]


def test_cuda_computes_more_rows_at_once() -> None:
    row = 4 * 151_936
    assert chunk_rows(row, on_cpu=False) == CUDA_CHUNK_ROWS > chunk_rows(row, on_cpu=True)
