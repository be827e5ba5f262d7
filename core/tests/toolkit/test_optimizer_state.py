"""The state that an optimizer has before its first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core_rl.toolkit.optimizer import create_moments


class _Counting(torch.optim.AdamW):
    """Counts the bytes of gradients at each step."""

    seen: list[int]

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.seen.append(sum(p.grad.nbytes for p in parameters if p.grad is not None))
        return super().step(closure)


@pytest.mark.parametrize("fused", [False, True])
def test_moments_are_created_without_gradients_of_all_parameters(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bound gradients, which for a model are as large as its float32 weights."""
    monkeypatch.setattr("core_rl.toolkit.optimizer.GRADIENT_BYTES", 1000)
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in (100, 100, 100, 400, 10, 0)]
    before, grad = [p.detach().clone() for p in parameters], torch.ones(100)
    parameters[1].grad = grad
    optimizer = _Counting(parameters, lr=0.5, fused=fused)
    optimizer.seen = []
    create_moments(optimizer)
    assert optimizer.seen == [800, 400, 1600, 40]
    assert parameters[1].grad is grad
    assert all(p.grad is None for p in parameters if p is not parameters[1])
    assert optimizer.param_groups[0]["lr"] == 0.5
    for parameter, value in zip(parameters, before, strict=True):
        assert torch.equal(parameter, value)
        state = optimizer.state[parameter]
        assert float(state["step"]) == 0
        assert not state["exp_avg"].any()
        assert not state["exp_avg_sq"].any()
