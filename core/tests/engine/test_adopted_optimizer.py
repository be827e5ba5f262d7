"""An engine around an optimizer that exists already, over sharded parameters (DTensors)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import engine_support as support
import pytest
import torch
from adopting_support import MOMENTUM, AdoptingAdamBackend, AdoptingBackend, AdoptingZeroBackend, spec
from torch import Tensor

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import CheckpointFormat, SaveLoadMeta
from core_rl.config.engine import ModelConfig, OptimizerConfig, TrainEngineConfig
from core_rl.config.layout import ParallelLayout
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.guards import require_kind
from core_rl.errors import WeightsError
from core_rl.launch.group import EngineGroup
from core_rl.reference import ReferenceConfig

LOSS = LossSpec(fn=support.weighted_nll)
CUT = MicroBatchSpec(max_tokens=24)
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8, max_grad_norm=0.5)
LENGTHS = (5, 9, 3, 12)


def config(dp: int) -> TrainEngineConfig:
    return TrainEngineConfig(
        model=ModelConfig(config=support.TINY), optimizer=OPTIMIZER, layout=ParallelLayout(dp=dp)
    )


@pytest.fixture(scope="module")
def group() -> Iterator[EngineGroup]:
    with EngineGroup(spec(AdoptingBackend), config(2), timeout_s=120) as ranks:
        yield ranks


def train(group: EngineGroup, seed: int) -> float:
    return group.train_batch(support.batch(seed, LENGTHS), LOSS, CUT)["grad_norm"]


def state(group: EngineGroup) -> dict[str, Tensor]:
    kinds = ("master", "momentum_buffer")
    return {f"{kind}/{name}": value for kind in kinds for name, value in group.named_tensors(kind).items()}


def test_sgd_moves_by_its_momentum(group: EngineGroup) -> None:
    """Clipped gradients of the whole batch; moments exist before the first step."""
    group.initialize(config=config(2))
    weights, moments = group.named_tensors("master"), group.named_tensors("momentum_buffer")
    assert weights.keys() == moments.keys() and not any(value.any() for value in moments.values())
    for seed in range(3):
        group.forward_backward(support.batch(seed, LENGTHS), LOSS, CUT)
        grads = group.named_tensors("grads")
        norm = group.optimizer_step()["grad_norm"]
        for name, grad in grads.items():
            moments[name] = MOMENTUM * moments[name] + grad * min(1.0, 0.5 / (norm + 1e-6))
            weights[name] = weights[name] - OPTIMIZER.lr * moments[name]
    torch.testing.assert_close(group.named_tensors("master"), weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", [AdoptingAdamBackend, AdoptingZeroBackend])
def test_adamw_takes_the_steps_of_the_reference(backend: type[AdoptingBackend]) -> None:
    found = []
    reference = ReferenceConfig(model=ModelConfig(config=support.TINY), optimizer=OPTIMIZER)
    for engine, settings in ((spec(backend), config(2)), ("reference", reference)):
        with EngineGroup(engine, settings, timeout_s=120) as group:
            norms = [train(group, seed) for seed in range(3)]
            found.append((norms, group.named_tensors("exp_avg_sq")))
    (norms, moments), (expected_norms, expected) = found
    assert norms == pytest.approx(expected_norms, rel=1e-3)
    torch.testing.assert_close(moments, expected, rtol=1e-2, atol=1e-9)


def test_missing_moments_name_the_optimizers_state() -> None:
    with pytest.raises(WeightsError, match="'exp_avg': the optimizer's `state` has no moments"):
        require_kind(config(1), "exp_avg", ())


@pytest.mark.parametrize("form", ["sharded", "portable"])
def test_a_checkpoint_holds_the_optimizers_state(
    group: EngineGroup, tmp_path: Path, form: CheckpointFormat
) -> None:
    group.initialize(config=config(2))
    train(group, 0)
    meta = SaveLoadMeta(path=str(tmp_path / "saved"), format=form)
    group.save(meta)
    saved = state(group)
    norm = train(group, 1)
    after = state(group)
    group.initialize(config=config(2))
    group.load(meta)
    assert all(torch.equal(value, saved[name]) for name, value in state(group).items())
    assert train(group, 1) == norm
    assert all(torch.equal(value, after[name]) for name, value in state(group).items())
