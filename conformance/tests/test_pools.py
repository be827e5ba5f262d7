"""Groups that checks share."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from core_rl.config.engine import ModelConfig, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.reference import SPEC
from core_rl_conformance import pools
from core_rl_conformance.outcomes import NotRun
from core_rl_conformance.pools import GroupPool, use_deterministic_kernels


class Group:
    """Notes what its ranks run."""

    spec = SPEC
    starting_s = 0.0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.ran: list[Any] = []

    def initialize(self, *_: Any) -> None:
        self.ran.append("initialize")

    def run(self, function: Any) -> None:
        self.ran.append(function)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", ["initialize"]), ("cuda", ["initialize", use_deterministic_kernels])]
)
def test_cuda_kernels_sum_in_fixed_order(
    monkeypatch: pytest.MonkeyPatch, device: Literal["cpu", "cuda"], expected: list[Any]
) -> None:
    monkeypatch.setattr(pools, "EngineGroup", Group)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    config = TrainEngineConfig(model=ModelConfig(config={"model_type": "qwen3"}), device=device)
    group: Any = GroupPool().start(SPEC, config)
    assert group.ran == expected


def test_layouts_beyond_gpus_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    config = TrainEngineConfig(
        model=ModelConfig(config={"model_type": "qwen3"}), device="cuda", layout=ParallelLayout(tp=2)
    )
    with pytest.raises(NotRun, match="2 ranks need a GPU each, and this machine has 1"):
        GroupPool().start(SPEC, config)


def test_nondeterministic_kernel_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    selected: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda on, warn_only: selected.append((on, warn_only))
    )
    use_deterministic_kernels(None)  # type: ignore[arg-type]
    assert selected == [(True, True)]
