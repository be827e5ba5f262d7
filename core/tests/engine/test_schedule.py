"""Learning rates as a pure function of the step, metrics, and the gradient norm."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from core_rl.backend.metrics import Metric, merge_metrics
from core_rl.backend.parameter_rules import decays
from core_rl.backend.tensors import LocalSlice
from core_rl.config.base import parse_config
from core_rl.config.engine import OptimizerConfig, ScheduleConfig
from core_rl.distributed.comm import Comm
from core_rl.engine.schedule import ScheduleFunction, learning_rate, schedule_length
from core_rl.errors import ConfigError, LossError
from core_rl.state.store import global_grad_norm

COSINE_HALF = 0.1 + 0.9 * 0.5
RATES = [
    ("constant", 0, None, [(0, 1.0), (100, 1.0)]),
    ("linear", 0, 10, [(0, 1.0), (5, 0.1 + 0.9 * 0.5), (10, 0.1), (99, 0.1)]),
    ("cosine", 0, 10, [(0, 1.0), (5, COSINE_HALF), (10, 0.1)]),
    ("linear", 4, 14, [(0, 0.2), (3, 0.8), (4, 1.0), (9, 0.55), (14, 0.1)]),
]


@pytest.mark.parametrize(("kind", "warmup", "total", "expected"), RATES)
def test_learning_rate(kind: str, warmup: int, total: int | None, expected: list[tuple[int, float]]) -> None:
    schedule = ScheduleConfig(type=kind, warmup_steps=warmup, total_steps=total, min_lr_ratio=0.1)
    config = OptimizerConfig(lr=2.0, schedule=schedule)
    length = schedule_length(config, None)
    for step, factor in expected:
        assert learning_rate(config, step, length) == pytest.approx(2.0 * factor)


def test_a_decay_needs_an_end() -> None:
    config = OptimizerConfig(schedule=ScheduleConfig(type="cosine"))
    with pytest.raises(ConfigError, match=r"set optimizer.schedule_steps or pass a FinetuneSpec"):
        schedule_length(config, None)
    assert schedule_length(config, 7) == 7
    late = OptimizerConfig(schedule=ScheduleConfig(type="linear", warmup_steps=5, total_steps=5))
    with pytest.raises(ConfigError, match="warmup_steps = 5, and the schedule ends after"):
        schedule_length(late, None)


def test_the_optimizer_names_the_end_of_its_schedule() -> None:
    assert schedule_length(OptimizerConfig(schedule=ScheduleConfig(type="linear"), schedule_steps=9), 4) == 9
    with pytest.raises(
        ValueError, match="schedule_steps = 9 and schedule.total_steps = 8 are the same thing"
    ):
        OptimizerConfig(schedule=ScheduleConfig(type="linear", total_steps=8), schedule_steps=9)


def halved(step: int, total: int | None) -> float:
    return 1.0 if step < 2 else 0.5 * (total or 1)


@pytest.mark.parametrize(
    ("schedule", "total", "expected"),
    [("test_schedule:halved", None, [2.0, 1.0]), ({"function": "test_schedule:halved"}, 3, [2.0, 3.0])],
)
def test_a_schedule_may_be_a_function(schedule: object, total: int | None, expected: list[float]) -> None:
    config = parse_config(OptimizerConfig, {"lr": 2.0, "schedule": schedule})
    length = schedule_length(config, total)
    function = ScheduleFunction.of(config, length)
    assert [learning_rate(config, step, length, function) for step in (1, 2)] == expected


BAD_FUNCTIONS = {
    "lambda step: 1.0": r"\(0, 9\) raised TypeError: .*takes the steps of the schedule so far and their total",
    "lambda step, total: 1 / step": r"\(0, 9\) raised ZeroDivisionError: division by zero",
    "lambda step, total: None": "returned None; return the factor of the learning rate, a number",
    "lambda step, total: float('nan')": "returned nan; return a finite factor",
    "lambda step, total: -0.1": "returned -0.1; return a finite factor that is not negative",
    "3": "is 3, which is no function",
}


@pytest.mark.parametrize("code", BAD_FUNCTIONS)
def test_a_wrong_schedule_function_is_named(code: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"f = {code}\n")
    config = OptimizerConfig(schedule=ScheduleConfig(function=f"{tmp_path / 'own.py'}:f"))
    with pytest.raises(ConfigError, match=rf"optimizer.schedule: .*own.py:f'?.*{BAD_FUNCTIONS[code]}"):
        ScheduleFunction.of(config, 9)


def test_schedule_function_replaces_remaining_fields() -> None:
    with pytest.raises(ConfigError, match="'function' replaces type, warmup_steps"):
        parse_config(ScheduleConfig, {"function": "m:f", "type": "linear", "warmup_steps": 3})


def test_only_matrices_decay() -> None:
    assert decays((3, 4)) and not decays((3,)) and not decays(())


def test_metrics_are_reduced_by_their_kind() -> None:
    parts = [
        {"m": Metric.mean(3.0, 1), "s": Metric.sum(1), "hi": Metric.max(2), "lo": Metric.min(2)},
        {
            "m": Metric.mean(torch.tensor(1.0), 3),
            "s": Metric.sum(5),
            "hi": Metric.max(-1),
            "lo": Metric.min(-1),
        },
        {},
    ]
    merged = {name: metric.result() for name, metric in merge_metrics(parts).items()}
    assert merged == {"m": 1.0, "s": 6.0, "hi": 2.0, "lo": -1.0}
    assert math.isnan(Metric.mean(0.0, 0).result())
    assert math.isnan((Metric.max(1.0) + Metric.max(math.nan)).result())


def test_invalid_metrics_are_refused() -> None:
    with pytest.raises(LossError, match="metric 'kl' is a float"):
        merge_metrics([{"kl": 0.1}])  # type: ignore[dict-item]
    with pytest.raises(LossError, match="is a mean in one micro-batch and a sum in another"):
        merge_metrics([{"kl": Metric.mean(1, 1)}, {"kl": Metric.sum(1)}])


def test_the_norm_is_accumulated_in_float64() -> None:
    grad = torch.full((2_500_000,), 1e-3)
    exact = math.sqrt(len(grad)) * float(grad[0].double())
    assert global_grad_norm([LocalSlice("w", (0,), grad)], Comm()) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("size", [1.0, 2.0**-80, 2.0**64])
def test_cuda_norms_use_a_single_kernel(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    grads = [size * torch.tensor([3.0, 0.0]), size * torch.tensor([[4.0]]), torch.zeros(0)]
    slices = [LocalSlice(str(number), (0,) * grad.dim(), grad) for number, grad in enumerate(grads)]
    monkeypatch.setattr("core_rl.state.store._on_cuda", lambda tensors: True)
    monkeypatch.setattr("core_rl.state.store.CHUNK", None)
    assert global_grad_norm(slices, Comm()) == 5.0 * size


def test_replicas_are_counted_once() -> None:
    first, second = LocalSlice("a", (0,), torch.tensor([3.0])), LocalSlice("b", (0,), torch.tensor([4.0]), 1)
    assert global_grad_norm([first, second], Comm()) == 3.0
    assert global_grad_norm([second], Comm()) == 0.0


def test_non_finite_gradients_give_a_non_finite_norm() -> None:
    assert math.isnan(global_grad_norm([LocalSlice("w", (0,), torch.tensor([1.0, math.nan]))], Comm()))
