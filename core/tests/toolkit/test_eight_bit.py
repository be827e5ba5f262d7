"""AdamW with moments of 8 bits: what needs torchao is skipped without it, and run by ``nox -s torchao``."""

from __future__ import annotations

import sys
from pathlib import Path

import engine_support as support
import pytest
import torch
from torch import nn

from core_rl.backend.loss import LossSpec
from core_rl.backend.meta import SaveLoadMeta
from core_rl.backend.parameter_rules import ParameterOptions
from core_rl.config.engine import ModelConfig, OptimizerConfig, TrainEngineConfig, UpdateType
from core_rl.data.micro_batch import MicroBatchSpec
from core_rl.engine.train import TrainEngine
from core_rl.errors import MissingPackage
from core_rl.reference import ReferenceConfig
from core_rl.toolkit.eight_bit import as_float32, is_eight_bit, memory_of
from core_rl.toolkit.optimizer import build_optimizer, moment_kinds, set_step_count

LARGE, SMALL = (64, 128), (7,)
CONFIG = OptimizerConfig(type="adamw_8bit", lr=1e-2)
needs_torchao = pytest.mark.skipif("not __import__('importlib.util').util.find_spec('torchao')")


def parameters() -> dict[nn.Parameter, ParameterOptions]:
    draw = torch.Generator().manual_seed(0)
    selected: list[tuple[UpdateType, tuple[int, ...]]] = [
        ("adamw_8bit", LARGE),
        ("adamw_8bit", SMALL),
        ("adamw", LARGE),
    ]
    actual = {
        nn.Parameter(torch.randn(shape, generator=draw)): ParameterOptions(kind, 1.0, 0.1)
        for kind, shape in selected
    }
    for parameter in actual:
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    return actual


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(MissingPackage, match=r"adamw_8bit.*needs torchao.*pip install 'core-rl\[torchao\]'"):
        build_optimizer(parameters(), CONFIG)


@pytest.mark.parametrize(("kind", "expected"), [("adamw", 800.0), ("muon", 400.0), ("adamw_8bit", 203.125)])
def test_the_plan_counts_the_moments_of_each_optimizer(kind: str, expected: float) -> None:
    config = TrainEngineConfig.model_validate(
        {"model": ModelConfig(config=support.TINY), "optimizer": {"type": kind}}
    )
    assert config.state_bytes(1000, 100).moments == expected


@needs_torchao
def test_only_large_parameters_have_codes() -> None:
    selected = parameters()
    optimizer = build_optimizer(selected, CONFIG)
    coded = [is_eight_bit(optimizer.state[parameter]["exp_avg"]) for parameter in selected]
    assert coded == [True, False, False]
    assert moment_kinds(optimizer) == ("exp_avg", "exp_avg_sq")
    before = [parameter.detach().clone() for parameter in selected]
    optimizer.step()
    assert all(not torch.equal(now, then) for now, then in zip(selected, before, strict=True))
    set_step_count(optimizer, 5)
    optimizer.step()
    assert [float(optimizer.state[parameter]["step"]) for parameter in selected] == [6.0] * 3


@needs_torchao
def test_only_changed_moments_are_rounded_again() -> None:
    selected = parameters()
    optimizer = build_optimizer(selected, CONFIG)
    optimizer.step()
    moment = optimizer.state[next(iter(selected))]["exp_avg"]
    codes, scales = (tensor.clone() for tensor in memory_of(moment).values())
    with as_float32(moment) as values:
        assert values.dtype == torch.float32 and values.shape == LARGE
    assert all(map(torch.equal, memory_of(moment).values(), (codes, scales)))
    with as_float32(moment) as values:
        values[2:].mul_(3.0)  # a view, as of a slice of fused matrices
    assert torch.equal(memory_of(moment)["codes"][:2], codes[:2])
    torch.testing.assert_close(memory_of(moment)["scale"][1:], scales[1:] * 3.0, rtol=0.01, atol=0)


@needs_torchao
@pytest.mark.parametrize("saved", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("loaded", ["adamw", "adamw_8bit"])
def test_checkpoints_convert_between_precisions(tmp_path: Path, saved: str, loaded: str) -> None:
    def start(kind: str) -> TrainEngine:
        optimizer = OptimizerConfig.model_validate({"type": kind, "lr": 1e-2})
        model = ModelConfig(config={**support.TINY, "vocab_size": 1024})
        return support.engine(ReferenceConfig(model=model, optimizer=optimizer))

    loss, cut = LossSpec(fn=support.weighted_nll), MicroBatchSpec(count=1)
    place = SaveLoadMeta(path=str(tmp_path / "saved"), format="sharded")
    engine = start(saved)
    engine.train_batch(support.batch(0, (5, 9)), loss, cut)
    expected = dict(engine.named_tensors("exp_avg"))
    engine.save(place)
    second = start(loaded)
    second.load(place)
    for name, value in second.named_tensors("exp_avg"):
        saved_value = expected[name]
        assert value is not None and saved_value is not None
        rounds = (saved, loaded) == ("adamw", "adamw_8bit")
        limit = 0.008 * float(saved_value.abs().max()) if rounds else 0.0
        assert float((value - saved_value).abs().max()) <= limit, name
    for built in (engine, second):
        built.destroy()
