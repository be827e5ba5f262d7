"""The code of "Without torch" in docs/write-an-engine.md, which needs MindSpore."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from page_blocks import DOCS, blocks_of


def test_page_code_gives_gradients(tmp_path: Path) -> None:
    page = DOCS / "write-an-engine.md"
    (block,) = (block for block in blocks_of(page) if block.reason == "needs MindSpore")
    script = tmp_path / "page.py"
    script.write_text("\n" * (block.line - 1) + block.code)
    state = runpy.run_path(str(script), run_name="__main__")["state"]
    (grad,) = (part.tensor for part in state.local("grads"))
    table = torch.zeros(61, 61, requires_grad=True)
    ids = torch.tensor([3, 1, 4, 1, 5])
    (-table[ids[:-1]].log_softmax(-1).gather(1, ids[1:, None]).sum()).backward()
    torch.testing.assert_close(grad, table.grad, rtol=0, atol=1e-4)
